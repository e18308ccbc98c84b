import pytest

from tasks.units import hours, prefixed, significant, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (789, "789 B"),
        (999.7, "1.00 kB"),
        (1_234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_999, "1.00 MB"),
        (412_000_000, "412 MB"),
        (4.5e12, "4.50 TB"),
    ],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text


def test_other_numbers() -> None:
    assert prefixed(1_053_824) == "1.05 M"
    assert prefixed(12.345) == "12.3"
    assert hours(0.0313) == "0.031 h"
    assert hours(0) == "0.0 h"
    assert hours(0.0000283) == "0.000028 h"
    assert hours(31.41) == "31.4 h"
    assert hours(12345.6) == "12,300 h"
    assert significant(22.198, 4) == "22.20"
    assert significant(float("nan")) == "nan"
