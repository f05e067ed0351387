//! Between ranks: forwards what they say, and does something to one record, or breaks connections.

use penstock_net::handshake::{CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What is done to one record, or to its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meddling {
    /// A bit of it is another one.
    Flip,
    /// It does not arrive.
    Drop,
    /// It arrives twice.
    Repeat,
    /// The next one arrives first.
    Swap,
    /// Its connection ends; both ends live.
    Reset,
}

/// Doors that lead to the ranks' own. Forwarding ends with the connections, and the rest when this is dropped.
pub(crate) struct Meddler {
    doors: Vec<u16>,
    over: Arc<AtomicBool>,
}

/// Which records are meddled with, counted over all connections.
struct Plan {
    kind: Meddling,
    at: Vec<u64>,
    seen: AtomicU64,
}

impl Meddler {
    /// In front of the listeners at these ports of this machine.
    pub(crate) fn before(ports: &[u16], kind: Meddling, at: Vec<u64>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let plan = Arc::new(Plan { kind, at, seen: AtomicU64::new(0) });
        let open = |port: &u16| {
            let door = TcpListener::bind("127.0.0.1:0").unwrap();
            let (number, port, over, plan) =
                (door.local_addr().unwrap().port(), *port, Arc::clone(&over), Arc::clone(&plan));
            std::thread::spawn(move || {
                for dialer in door.incoming().flatten().take_while(|_| !over.load(Ordering::Acquire)) {
                    // Whoever is gone is not there for those who dial it.
                    let Ok(listener) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                    let (back, forth) = (clones(&listener, &dialer), (dialer, listener));
                    let plans = [Arc::clone(&plan), Arc::clone(&plan)];
                    let [one, other] = plans;
                    std::thread::spawn(move || one.forward(forth, HELLO_BYTES + PROOF_BYTES));
                    std::thread::spawn(move || other.forward(back, CHALLENGE_BYTES + 1));
                }
            });
            number
        };
        Self { doors: ports.iter().map(open).collect(), over }
    }

    /// Where the ranks are said to be.
    pub(crate) fn doors(&self) -> &[u16] {
        &self.doors
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // They wait for the next one who dials.
        self.doors.iter().for_each(|door| drop(TcpStream::connect(("127.0.0.1", *door))));
    }
}

fn clones(one: &TcpStream, other: &TcpStream) -> (TcpStream, TcpStream) {
    (one.try_clone().unwrap(), other.try_clone().unwrap())
}

impl Plan {
    /// What one end says to the other, until either has ended.
    fn forward(&self, (mut from, mut to): (TcpStream, TcpStream), handshake_bytes: usize) {
        let _ = self.forward_all(&mut from, &mut to, handshake_bytes);
        let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
    }

    fn forward_all(
        &self,
        from: &mut TcpStream,
        to: &mut TcpStream,
        handshake_bytes: usize,
    ) -> io::Result<()> {
        io::copy(&mut from.take(handshake_bytes as u64), to)?;
        let mut held: Option<Vec<u8>> = None;
        loop {
            let mut record = self.record(from)?;
            let meddled = self.at.contains(&self.seen.fetch_add(1, Ordering::Relaxed));
            match self.kind {
                _ if !meddled => {}
                Meddling::Flip => {
                    let middle = record.len() / 2;
                    record[middle] ^= 4;
                }
                Meddling::Drop => continue,
                Meddling::Repeat => to.write_all(&record)?,
                Meddling::Swap => {
                    held = Some(record);
                    continue;
                }
                Meddling::Reset => return Ok(()),
            }
            to.write_all(&record)?;
            if let Some(held) = held.take() {
                to.write_all(&held)?;
            }
        }
    }

    /// The next record; where connections only end, whatever has come.
    fn record(&self, from: &mut TcpStream) -> io::Result<Vec<u8>> {
        if self.kind == Meddling::Reset {
            let mut some = vec![0; 4096];
            let count = from.read(&mut some)?;
            some.truncate(count);
            return if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(some) };
        }
        let mut length = [0; 2];
        from.read_exact(&mut length)?;
        let mut record = length.to_vec();
        record.resize(2 + usize::from(u16::from_le_bytes(length)), 0);
        from.read_exact(&mut record[2..])?;
        Ok(record)
    }
}
