"""The extras, package by package."""
