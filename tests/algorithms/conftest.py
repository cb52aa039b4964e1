from helpers.run_fixtures import _seeded, fit, make_data, make_module, make_trainer  # noqa: F401
