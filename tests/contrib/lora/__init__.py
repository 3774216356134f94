"""Adapters beside frozen layers."""
