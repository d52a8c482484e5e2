"""What instances cost: the prices that come with batchfinder, and a file of the user's."""

from __future__ import annotations

from datetime import date

import pytest

from batchfinder.devices import Price, all_instances, known_prices, parse_prices
from batchfinder.errors import InvalidValue


def test_every_price_is_of_an_instance() -> None:
    """Names are the catalog's; each price is positive, dated and has a source, and a spot price is the lower one."""
    prices = known_prices()
    assert set(prices) <= {instance.name for instance in all_instances()}
    for price in prices.values():
        assert price.usd_per_hour is not None
        assert 0 < price.usd_per_hour < 200
        assert price.spot_usd_per_hour is None or 0 < price.spot_usd_per_hour < price.usd_per_hour
        assert price.as_of is not None
        assert date(2026, 1, 1) < price.as_of
        assert price.source.startswith("https://")


def test_a_gpu_costs_dollars_not_cents() -> None:
    """Nothing has slipped by a decimal: a GPU costs between 10 cents and 20 dollars an hour."""
    each = {instance.name: instance.num_gpus for instance in all_instances()}
    for name, price in known_prices().items():
        assert price.usd_per_hour is not None
        assert 0.1 < price.usd_per_hour / each[name] < 20, name


def test_several_of_one() -> None:
    """Two machines cost twice as much, and what is not known stays so."""
    price = Price(3.5, None, "us-east-1", date(2026, 7, 20), "https://somewhere")
    assert price.times(2) == Price(7.0, None, "us-east-1", date(2026, 7, 20), "https://somewhere")
    assert Price(None, 1.5, "", None, "").times(3).spot_usd_per_hour == 4.5


CSV = "instance,usd_per_hour,spot_usd_per_hour,region,as_of\nNC24s v3,$12.24,4,eastus,2026-07-20\nm5.large,0.1,,,\n"
TOML = """
[[price]]
instance = "standard_nc24s_v3"
usd_per_hour = 12.24
spot_usd_per_hour = 4
region = "eastus"
as_of = 2026-07-20
"""


@pytest.mark.parametrize(("path", "text"), [("mine.csv", CSV), ("mine.toml", TOML)])
def test_a_file_of_ones_own(path: str, text: str) -> None:
    """CSV or TOML; names as they are typed elsewhere, and what is no instance of the catalog is passed over."""
    price = Price(12.24, 4.0, "eastus", date(2026, 7, 20), path)
    assert parse_prices("--prices", path, text) == {"Standard_NC24s_v3": price}
    assert price.words == "in eastus as of 2026-07-20"


def test_what_need_not_be_said() -> None:
    """The name and the price are enough; then the file is where it is from."""
    (price,) = parse_prices("--prices", "mine.csv", "instance, usd_per_hour\np3.2xlarge, 2.5\n").values()
    assert price == Price(2.5, None, "", None, "mine.csv")
    assert price.words == "by mine.csv"


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("mine.csv", "", "expected CSV with instance,usd_per_hour in its first line"),
        ("mine.csv", "instance\np3.2xlarge\n", "expected CSV with instance,usd_per_hour in its first line"),
        ("mine.csv", "instance,usd_per_hour\nm5.large,1\n", "of which one at least is of `batchfinder instances`"),
        ("mine.csv", "instance,usd_per_hour\np3.2xlarge,lots\n", "'lots'; expected a positive number of US dollars"),
        ("mine.csv", "instance,usd_per_hour\np3.2xlarge,-1\n", "'-1'; expected a positive number of US dollars"),
        ("mine.csv", "instance,usd_per_hour,as_of\np3.2xlarge,1,July\n", "'July'; expected as_of as 2026-07-20"),
        ("mine.toml", "price = 3", "or TOML with a [[price]] for each instance"),
        ("mine.toml", "[[price]", "or TOML with a [[price]] for each instance"),
        ("mine.toml", "[[rate]]\nx = 1", "or TOML with a [[price]] for each instance"),
    ],
)
def test_what_is_no_list_of_prices(path: str, text: str, said: str) -> None:
    """It is said what is wrong, with the option."""
    with pytest.raises(InvalidValue) as caught:
        parse_prices("--prices", path, text)
    assert str(caught.value).startswith("--prices: invalid value ")
    assert said in str(caught.value)
