"""Which authorities count at which url."""

from __future__ import annotations

import ssl
from pathlib import Path

import certifi
import pytest

from gateway.upstream.trust import Trust


def test_a_url_without_an_authority_of_its_own_gets_the_public_ones() -> None:
    trust = Trust({})
    context = trust("https://h")
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) > 50
    assert trust("https://other") is context


def test_a_url_with_an_authority_of_its_own_gets_no_other(tmp_path: Path) -> None:
    bundle = Path(certifi.where()).read_text()
    end = "-----END CERTIFICATE-----"
    one = bundle[bundle.index("-----BEGIN") : bundle.index(end)] + end + "\n"
    (tmp_path / "ca.pem").write_text(one)
    trust = Trust({"https://h": tmp_path / "ca.pem", "https://g": tmp_path / "ca.pem"})
    assert len(trust("https://h").get_ca_certs()) == 1
    assert trust("https://g") is trust("https://h")
    assert trust("https://h").minimum_version is ssl.TLSVersion.TLSv1_2
    assert trust("https://h").verify_mode is ssl.CERT_REQUIRED and trust("https://h").check_hostname


def test_an_authority_that_is_not_there_is_no_trust_in_all(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Trust({"https://h": tmp_path / "missing.pem"})
