"""Certificates for tests, made by the program openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Files:
    cert: str
    key: str

    def texts(self) -> tuple[bytes, bytes]:
        """Return key and certificate."""
        return Path(self.key).read_bytes(), Path(self.cert).read_bytes()

    def root(self) -> bytes:
        """Return the certificate, for those who trust it."""
        return self.texts()[1]

    def spoil(self) -> None:
        Path(self.key).write_text("no key")
        Path(self.cert).write_text("no certificate")

    def replace_by(self, other: "Files") -> None:
        Path(self.cert).write_bytes(Path(other.cert).read_bytes())
        Path(self.key).write_bytes(Path(other.key).read_bytes())


def self_signed(folder: Path, name: str, alternatives: str = "IP:127.0.0.1") -> Files:
    """Make a certificate that is its own root."""
    files = Files(str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"))
    options = f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}".split()
    named = ["-addext", f"subjectAltName={alternatives}"]
    command = ["openssl", "req", "-x509", *options, *named, "-keyout", files.key, "-out", files.cert]
    subprocess.run(command, check=True, capture_output=True)
    return files


def expired(folder: Path, name: str) -> Files:
    """Make one whose time is over."""
    files = self_signed(folder, name)
    command = ["openssl", "x509", "-in", files.cert, "-signkey", files.key, "-days", "-1"]
    done = subprocess.run(command, check=True, capture_output=True)
    Path(files.cert).write_bytes(done.stdout)
    return files
