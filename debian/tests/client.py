# SPDX-License-Identifier: Apache-2.0
"""The client of python3-pvrd, which is not the daemon's own copy, writes a text."""

import pvrd.client

assert pvrd.client.__file__.startswith("/usr/lib/python3/dist-packages/"), pvrd.client.__file__
with pvrd.client.Client() as client, client.open_text({"model": "tiny"}) as session:
    events = list(session.generate("Good morning", {"max_tokens": 8}))
assert events[-1]["type"] == "end", events[-1]
print(f"{sum(event['type'] == 'token' for event in events)} tokens by python3-pvrd")
