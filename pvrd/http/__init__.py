# SPDX-License-Identifier: Apache-2.0
"""pvr-http: pvrd for programs that speak OpenAI's HTTP API; a client of the daemon like any other.
docs/http.md. Needs the extra `http` (starlette, uvicorn)."""
