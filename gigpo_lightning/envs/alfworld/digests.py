"""Digests of the rules and sentences that the engine implements; data of `recognise.py`.

Made from the domain and grammar of alfworld 0.4.2, its game files of version 2.1.2 (whose `help` is written inline) and
the wording of older files, by `recognise.domain_digests` and `recognise.grammar_items`.
"""

from __future__ import annotations

# Each action of the ALFRED text domain, without costs and bookkeeping, and its list of types.
DOMAIN_DIGESTS: dict[str, str] = {
    ":types": "d6b136a14d322031",
    "look": "355d19793bae9cdc",
    "inventory": "cb9cd9e8d81cec72",
    "examinereceptacle": "244f6aa9e56b07de",
    "examineobject": "46ea20d8c8031ec4",
    "gotolocation": "72c7443dc8cd632b",
    "openobject": "67c91e82a5e5a6e2",
    "closeobject": "94383f2bad4b020e",
    "pickupobject": "7bf6fcb2772f8af9",
    "putobject": "069b06646b62a992",
    "cleanobject": "e401a9829616b641",
    "heatobject": "93fc47f8fb196ab0",
    "coolobject": "ca8b6186d94db594",
    "toggleobject": "fdd3292c7c6cbdd8",
    "sliceobject": "8f5b4049d3e7948c",
    "help": "cb9cd9e8d81cec72",
}

# Each command and each sentence in use; the value says which variant it is ("" where there is only one).
GRAMMAR_DIGESTS: dict[str, dict[str, str]] = {
    "CloseObject.feedback": {"5f64a4d937a94ff3": ""},
    "GotoLocation.feedback": {"a3671ee81500ab9d": "receptacle", "3ad2e532a96e6aa9": "location"},
    "OpenObject.feedback": {"7c9d22dbb0e1ae5d": ""},
    "PickupObject.feedback": {"c49a01da16fa1de3": ""},
    "PutObject.feedback": {"c2cd46c3f9c850e1": "move", "887567634af47b9b": "put"},
    "cleanObject.feedback": {"2eeadbb0e9562bdc": ""},
    "command cleanobject": {"c085f3b554a3ec1c": ""},
    "command closeobject": {"f01a17be1e7ecb0a": ""},
    "command coolobject": {"b433fe1441343ca2": ""},
    "command examineobject": {"5a9db45e78b464cb": ""},
    "command examinereceptacle": {"1c99ffa91550e247": ""},
    "command gotolocation": {"b0bb439d34545f0a": ""},
    "command heatobject": {"c7f480bfe25bdc28": ""},
    "command help": {"59b8db424a7aaaee": "", "f71d31a1d0f3aeaa": "inline"},
    "command inventory": {"83ac3a1ab6e5f15c": ""},
    "command look": {"bdb56f2a8d80c7b4": ""},
    "command openobject": {"9f24a628707de687": ""},
    "command pickupobject": {"1c8ba2cc81d294ae": ""},
    "command putobject": {"838204799160768b": "move", "faa1860c49f9b12c": "put"},
    "command sliceobject": {"c586e9e8ddb4b0e9": ""},
    "command toggleobject": {"43b166ae7d888b38": ""},
    "coolObject.feedback": {"6c30b2bdfd2fc625": ""},
    "examineObject.feedback": {"103a43b7c0408991": ""},
    "examineReceptacle.feedback": {"72b4c7dc2004073e": ""},
    "heatObject.feedback": {"131f96d9ca7f4704": ""},
    "help.feedback": {"68f5fbf08f41c980": ""},
    "intro": {"35b317b87ba4c2c7": ""},
    "inventory.feedback": {"2b9d9039b4864bd6": ""},
    "list_appliances": {"b676c98ae1991418": ""},
    "list_empty": {"c8f396061973fdbb": ""},
    "list_last_separator": {"66f22c7a5b9c5913": ""},
    "list_objects_on_the_floor": {"c21b853f222306aa": ""},
    "list_separator": {"8cedf4e173a856f0": ""},
    "look-variations": {"de5b437b5a01de93": ""},
    "look.feedback": {"0992bfeb045dd9b0": ""},
    "overview(o)": {"1c5594bb30180d31": ""},
    "overview(r)": {"801e2fb368f8a216": ""},
    "sliceObject.feedback": {"ae26358dac05feef": ""},
    "toggleObject.feedback": {"55250327abc6c513": ""},
}
