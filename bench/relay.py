"""The least that a session call could do: store a row, call the upstream, store the answer. For `bench.sessions`.

    python -m bench.relay UPSTREAM_PORT DATABASE

Nothing is checked, nothing is claimed, and nobody else could go on with it. Prints the port it listens on.
"""

from __future__ import annotations

import asyncio
import sys

import psycopg
import uvloop

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def main(upstream_port: int, database: str) -> None:
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as accepting,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as settling,
    ):
        await accepting.execute("CREATE TABLE relay (id bigserial PRIMARY KEY, state text, body text)")
        upstream, to_upstream = await asyncio.open_connection("127.0.0.1", upstream_port)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while not reader.at_eof():
                try:
                    body = await _message(reader)
                except asyncio.IncompleteReadError:
                    break
                cursor = await accepting.execute(
                    "INSERT INTO relay (state, body) VALUES ('accepted', %s) RETURNING id", [body.decode()]
                )
                row = await cursor.fetchone()
                to_upstream.write(_HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
                answer = await _message(upstream)
                await settling.execute(
                    "UPDATE relay SET state = 'done', body = %s WHERE id = %s", [answer.decode(), row[0] if row else 0]
                )
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
            writer.close()

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
