"""An HTTP server for tests that many clients ask at once."""

from http.server import ThreadingHTTPServer


class PatientHTTPServer(ThreadingHTTPServer):
    """Queues up to 128 connections; `ThreadingHTTPServer` queues five, and the rest may be reset."""

    request_queue_size = 128
