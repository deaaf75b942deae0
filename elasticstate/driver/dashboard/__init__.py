"""The dashboard of a job (``--dashboard``): a web page with server-sent events. Only ``server`` imports aiohttp."""
