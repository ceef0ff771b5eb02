"""The field cases that concern the router, and of those without a test here: why.

A test says which it is for by `@pytest.mark.case(...)`; `test_case_ids.py` holds both lists against each other.
"""

from __future__ import annotations

from typing import Final

FAMILIES: Final = {
    "SSE": "B001 B002 B004 B005 B006 B007 B008 B010 B011 B012 B014 B015 B016 B018 B020",
    "CAN": "B021 B022 B024 B025 B026 B028 B030 B031 B032 B034 B216",
    "RTY": "B035 B036 B037 B038 B040 B041 B042 B044 B045 B046 B048 B050 B051 B052",
    "REQ": "B053 B054 B055 B056 B058 B060 B061 B062 B064 B065 B066 B068 B070 B071 B072 B074 B075 B076 B078 B080 B081 B082",
    "MOD": "B084 B085 B086 B088 B090 B091 B092 B094 B095",
    "LB": "B096 B098 B100 B101 B102 B104 B105 B106 B108 B110 B111 B214",
    "AUT": "B163 B164 B165 B166 B168 B170 B171 B172 B174 B175",
    "TESTS": "T01 T02 T03 T06 T07 T08 T10 T11 T13 T14 T16 T17 T18 T20 T22 T23 T24 T26 T27 T29 T30 T31 T32 T34 T35 T40 T41",
}
ALL: Final = frozenset(case for cases in FAMILIES.values() for case in cases.split())

# Cases of other families that a test here happens to show as well.
OTHERS: Final = frozenset({"B120"})

_UPLOADS: Final = "waits for multipart bodies and large uploads"
_AFFINITY: Final = "waits for affinity: no request is bound to an engine yet"
WITHOUT_TEST: Final = {
    "B034": "the agents' room: a load goes on whoever left; a router only says that a model is wanted",
    "B066": _UPLOADS,
    "B068": _UPLOADS,
    "T23": _UPLOADS,
    "B094": "no list of an engine is read: /v1/models is the router's own table",
    "B104": _AFFINITY,
    "B106": _AFFINITY,
}
