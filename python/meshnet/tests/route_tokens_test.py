"""Route tokens, as both languages have them."""

import dataclasses
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from meshnet.errors import ControlError, Reason
from meshnet.route_tokens import RouteClaim, check, issue
from meshnet.signing import SigningKey

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
CLAIM = RouteClaim(b"0123456789abcdef".hex(), 7, 1, "w1", 2_000)
# cc/worker/route_token_test.cc lets the same one in.
GOLDEN = (
    b"CiAzMDMxMzIzMzM0MzUzNjM3MzgzOTYxNjI2MzY0NjU2NhAHGAEiAncxKNAP.Rsg8Y2g28gP63aaxzI3mX2H-"
    b"v1QjfjfrhEeL3-KZwwLGM-dnvUES35A0yn_40EZFQWAuUrkjpkww2o8CtRMGDQ==.Vkdap1RjR0wChd9dvyvKtw=="
)


def test_the_golden_token() -> None:
    assert KEY.key_id == "56475aa75463474c0285df5dbf2bcab7"
    assert issue(KEY, CLAIM) == GOLDEN
    assert check(KEY.trust(), GOLDEN, 1_999) == CLAIM


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RouteClaim)])
def test_every_field_is_signed(field: str) -> None:
    value = getattr(CLAIM, field)
    change: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "x"}
    other = dataclasses.replace(CLAIM, **change)
    signature = GOLDEN.split(b".", 1)[1]
    forged = issue(KEY, other).split(b".", 1)[0] + b"." + signature
    with pytest.raises(ControlError) as caught:
        check(KEY.trust(), forged, 0)
    assert caught.value.reason is Reason.UNAUTHENTICATED
