"""What every test may use: the real engines (``tests/engines``), started when the first test asks for one."""

pytest_plugins = ["engines.fixtures", "tally"]
