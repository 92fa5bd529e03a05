"""Folders made by `tightwire prepare`: layers packed for streaming. Start with `folder`."""
