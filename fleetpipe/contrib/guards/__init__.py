"""Checks now and then that ranks have the same bits wherever they must."""
