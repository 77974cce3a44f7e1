"""The gateway's own certificate: what clients see, and how it is replaced while answers run."""

import asyncio
import pathlib
import ssl

import openai
import pytest
from meshnet.certificates import Authority
from meshnet.transport import KeyFiles
from meshnet_gguf.errors import MeshnetError
from meshnet_gguf.gateway import Listener
from meshnet_gguf.testing.gateway import MODEL, FakeGateway, fake_gateway

END = 60.0
SLOW = ("--fake_delay=3ms", "--context_tokens=100000")


def issue(authority: Authority) -> KeyFiles:
    return KeyFiles(*authority.issue("gateway", ["127.0.0.1"]))


def trusting(folder: pathlib.Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "authorities.pem")


async def shown(gateway: FakeGateway, trust: ssl.SSLContext) -> bytes:
    """The certificate that a new connection gets."""
    port = int(gateway.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(certificate, bytes)
    return certificate


def held(files: KeyFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text("ascii"))


async def test_a_certificate_is_replaced_while_an_answer_runs(tmp_path: pathlib.Path) -> None:
    authority = Authority.create(tmp_path)
    files = issue(authority)
    first, trust = held(files), trusting(tmp_path)
    async with (
        asyncio.timeout(END),
        fake_gateway((), *SLOW, tls=files) as gateway,
        openai.DefaultAsyncHttpxClient(verify=trust, timeout=END) as http,
    ):
        assert gateway.url.startswith("https://")
        client = gateway.client.with_options(http_client=http)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=300,
            stream=True,
        )
        chunks = aiter(stream)
        await anext(chunks)
        assert await shown(gateway, trust) == first
        # Half of a new pair changes nothing.
        key = files.key.read_bytes()
        issue(authority)
        second, new_key = held(files), files.key.read_bytes()
        files.key.write_bytes(key)
        assert await shown(gateway, trust) == first
        files.key.write_bytes(new_key)
        assert await shown(gateway, trust) == second != first
        # Another authority's: whoever trusts the old one alone is told, by TLS.
        issue(Authority.create(tmp_path / "other"))
        other = tmp_path / "other"
        files.key.write_bytes((other / "gateway.key").read_bytes())
        files.certificate.write_bytes((other / "gateway.pem").read_bytes())
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(gateway, trust)
        assert await shown(gateway, trusting(other)) == held(files)
        # The answer that began before all this goes on to its end.
        finish = [chunk.choices[0].finish_reason async for chunk in chunks][-1]
        assert finish == "length"
        fresh = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
        async with fresh:
            with pytest.raises(openai.APIConnectionError):
                await fresh.models.list()


def test_files_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    files = issue(Authority.create(tmp_path))
    for wrong in (
        KeyFiles(tmp_path / "none.pem", files.key),
        KeyFiles(files.key, files.key),
        KeyFiles(files.certificate, tmp_path / "ca.key"),
    ):
        with pytest.raises(MeshnetError) as refused:
            Listener("127.0.0.1:0", tls=wrong)
        assert refused.value.reason_name == "CONFIGURATION_INVALID"
