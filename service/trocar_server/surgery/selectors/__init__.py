"""Selector grammar: parser and formatter."""
