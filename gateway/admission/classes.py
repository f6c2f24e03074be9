"""Which class a key belongs to when it does not say, or names one that is gone; used by keys.py and `poolgate keys`."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config.schema import ClassSection

VLLM_DEFAULT_PRIORITY = 0  # vLLM 0.33: what a request without `priority` runs with


def default_class(classes: Mapping[str, ClassSection]) -> str:
    """The class of a key that names none.

    1. "default", where the config has a class of that name.
    2. Else the class nearest to priority 0: what vLLM gives a request that says nothing. A class that goes before
       the ordinary ones (a negative number) and one that goes after them (batch) have both to be given by name.
    3. Two equally near: the one that goes later, since nobody is preferred by omission.
    """
    if "default" in classes:
        return "default"
    return min(classes, key=lambda name: (abs(classes[name].priority - VLLM_DEFAULT_PRIORITY), -classes[name].priority))


def lowest_class(classes: Mapping[str, ClassSection]) -> str:
    """The class that goes last: where a key lands whose class was removed from the config."""
    return max(classes, key=lambda name: classes[name].priority)
