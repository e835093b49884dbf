//! One end of a connection: lengths are checked before memory is taken, and what goes wrong names the end that it went wrong at.

use std::fmt;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::error::{Error, Result};

/// Bytes that are passed on at once.
const PIECE: usize = 1 << 20;
/// How long is waited between looks at who speaks first.
const PAUSE: Duration = Duration::from_micros(50);

/// A client or a server.
pub struct Peer {
    name: String,
    from: BufReader<TcpStream>,
    to: TcpStream,
}

impl Peer {
    /// `role` says which end it is: `the client`, `the server`.
    ///
    /// # Errors
    /// A connection that is already closed.
    pub fn new(role: &str, to: TcpStream) -> Result<Peer> {
        let address = to.peer_addr().map_or_else(|_| "?".to_owned(), |address| address.to_string());
        let name = format!("{role} {address}");
        let from = to.set_nodelay(true).and_then(|()| to.try_clone());
        let from = from.map_err(|e| Error::new(&name, format!("cannot be spoken to: {e}")))?;
        Ok(Peer { name, from: BufReader::with_capacity(1 << 16, from), to })
    }

    /// An error about this end.
    pub fn error(&self, message: impl fmt::Display) -> Error {
        Error::new(&self.name, message)
    }

    /// Fills `out` with the next bytes of `what`.
    ///
    /// # Errors
    /// Where the connection ends before.
    pub fn fill(&mut self, out: &mut [u8], what: &str) -> Result<()> {
        let read = self.from.read_exact(out);
        read.map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => self.error(format!("closed the connection in the middle of {what}")),
            _ => self.error(format!("{what} cannot be received: {e}")),
        })
    }

    /// The command of the next request; `None` where the connection has ended between two of them.
    ///
    /// # Errors
    /// The system's.
    pub fn command(&mut self) -> Result<Option<u8>> {
        let mut byte = [0];
        match self.from.read(&mut byte) {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(byte[0])),
            Err(e) if e.kind() == ErrorKind::Interrupted => self.command(),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Ok(None),
            Err(e) => Err(self.error(format!("no request can be received: {e}"))),
        }
    }

    /// The length of what comes next.
    ///
    /// # Errors
    /// As for [`Peer::fill`].
    pub fn length(&mut self, what: &str) -> Result<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes, what)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// The next `length` bytes, of which there are at most `limit`; memory is taken as they arrive.
    ///
    /// # Errors
    /// More than that, or a connection that ends before.
    pub fn bytes(&mut self, length: u64, limit: u64, what: &str) -> Result<Vec<u8>> {
        if length > limit {
            let wrong = self.error(format!("{what} is too long"));
            return Err(wrong.expected(format!("at most {limit} bytes")).found(format!("{length} bytes")));
        }
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            let (begin, left) = (bytes.len(), length - bytes.len() as u64);
            bytes.resize(begin + left.min(PIECE as u64) as usize, 0);
            self.fill(&mut bytes[begin..], what)?;
        }
        Ok(bytes)
    }

    /// A reply of exactly `length` bytes.
    ///
    /// # Errors
    /// One of another length.
    pub fn reply(&mut self, length: u64, what: &str) -> Result<Vec<u8>> {
        let found = self.length(what)?;
        self.must_be(found, length, what)?;
        self.bytes(found, length, what)
    }

    /// Complains where a length is not what it has to be.
    ///
    /// # Errors
    /// That it is not.
    pub fn must_be(&self, found: u64, expected: u64, what: &str) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let wrong = self.error(format!("{what} has a length that it cannot have"));
        Err(wrong.expected(format!("{expected} bytes")).found(format!("{found} bytes")))
    }

    /// Sends all parts.
    ///
    /// # Errors
    /// Where the other side has gone.
    pub fn send(&mut self, parts: &[&[u8]]) -> Result<()> {
        // Short messages are one packet.
        let short = parts.iter().map(|part| part.len()).sum::<usize>() <= PIECE;
        let sent = match short {
            true => self.to.write_all(&parts.concat()),
            false => parts.iter().try_for_each(|part| self.to.write_all(part)),
        };
        sent.map_err(|e| self.error(format!("cannot be sent to: {e}")))
    }

    /// Passes on `length` bytes of `what`, and shows them to `look` piece by piece.
    ///
    /// # Errors
    /// Of either end.
    pub fn pass(
        &mut self,
        to: &mut Peer,
        length: u64,
        what: &str,
        look: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let mut piece = vec![0; length.min(PIECE as u64) as usize];
        let mut left = length;
        while left > 0 {
            let next = left.min(PIECE as u64) as usize;
            self.fill(&mut piece[..next], what)?;
            look(&piece[..next]);
            to.send(&[&piece[..next]])?;
            left -= next as u64;
        }
        Ok(())
    }

    /// Whether bytes have arrived, or the connection has ended.
    fn has_spoken(&mut self) -> Result<bool> {
        if !self.from.buffer().is_empty() {
            return Ok(true);
        }
        let stream = self.from.get_ref();
        let mut byte = [0];
        let looked = stream.set_nonblocking(true).and_then(|()| {
            let looked = stream.peek(&mut byte);
            stream.set_nonblocking(false).and(looked)
        });
        match looked {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(self.error(format!("cannot be listened to: {e}"))),
        }
    }

    /// Waits until one of two has spoken; whether it was this one.
    ///
    /// # Errors
    /// The system's.
    pub fn speaks_before(&mut self, other: &mut Peer) -> Result<bool> {
        loop {
            if self.has_spoken()? {
                return Ok(true);
            }
            if other.has_spoken()? {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
    }
}
