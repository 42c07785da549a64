"""The spelling of numbers in config.json of reference folders."""


def plain(value):
    """Undoes the spelling of infinity in config.json."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value
