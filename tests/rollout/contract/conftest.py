"""Opens each engine with each policy once."""

import pytest
from helpers.engines import open_subject


@pytest.fixture(scope="package")  # one vLLM in a process: it ends before other tests begin
def subject(request, tmp_path_factory):
    with open_subject(request.param, tmp_path_factory.mktemp(request.param)) as opened:
        yield opened


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Tests of one subject stand together: a sampler takes seconds to start."""
    places = [place for place, item in enumerate(items) if "subject" in getattr(item, "fixturenames", ())]
    ordered = sorted((items[place] for place in places), key=lambda item: item.callspec.params["subject"])
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
