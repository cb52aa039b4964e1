"""An HTTP server for tests that many clients ask at once."""

from http.server import ThreadingHTTPServer


class PatientHTTPServer(ThreadingHTTPServer):
    """Keeps connections waiting of which `ThreadingHTTPServer`, behind five, may reset some."""

    request_queue_size = 128
