//! Where this process can be reached: by TCP, and beside it at a Unix socket, by processes of its host.
//!
//! The Unix socket has an *abstract* name, which only processes of the same network namespace can connect to: who gets
//! there is on this host, as the job understands it ([`crate::handshake::name_on_host`]), and needs no other proof of that. Whether it
//! belongs to the job it proves as everybody else. A process without such a socket is reached by TCP.

use crate::congestion;
use crate::handshake::{JOB_ID_BYTES, name_on_host};
use crate::socket::Socket;
use crate::transport::SharedMemory;
use penstock_core::Rank;
use socket2::{Domain, SockAddr, Type};
use std::io::{self, ErrorKind};
use std::net::TcpListener;

/// Connections that the kernel keeps for us until they are accepted; it may allow fewer (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;

/// The sockets that this process listens on.
#[derive(Debug)]
pub struct Listeners(pub(super) Vec<Socket>);

impl Listeners {
    /// Only by TCP; who is accepted has this congestion control, if not the system's. Nobody may know the port yet.
    ///
    /// # Errors
    /// What the system said.
    pub fn new(tcp: TcpListener, congestion_control: Option<&str>) -> io::Result<Self> {
        let socket = Socket::new(tcp.into())?;
        congestion::set(&socket, congestion_control)?;
        Ok(Self(vec![socket]))
    }

    /// Also by processes of this host, if memory can be shared with them here.
    #[must_use]
    pub fn and_on_host(mut self, secret: &[u8], job_id: &[u8; JOB_ID_BYTES], rank: Rank) -> Self {
        let port = self.port().unwrap_or_default();
        let on_host = SharedMemory::create().and_then(|_| {
            let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
            socket.bind(&on_host(secret, job_id, rank, port)?)?;
            socket.listen(BACKLOG)?;
            Socket::new(socket)
        });
        self.0.extend(on_host);
        self
    }

    /// The port of TCP.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        self.0.iter().find_map(|socket| Some(socket.local_addr().ok()?.as_socket()?.port()))
    }

    /// A longer queue than one was bound with: what does not fit waits a second for TCP to try again, and the first
    /// iteration of a large job, or a flood, brings hundreds at once.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.0.iter().try_for_each(|socket| socket.listen(BACKLOG))
    }

    /// The next connection that waits at any of them. Over a Unix socket processes of other users are turned away: whatever
    /// descriptors they hand over would have to be closed here, and closing some takes as long as their owner likes.
    ///
    /// # Errors
    /// `ConnectionAborted`: there was one of another user. What the system said.
    pub(super) fn accept(&self) -> io::Result<Socket> {
        // SAFETY: asks for a number.
        let user = unsafe { libc::geteuid() };
        for socket in &self.0 {
            match socket.accept() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => {
                    let socket = Socket::new(other?.0)?;
                    let is_welcome = socket.is_tcp() || socket.is_of_user(user);
                    return if is_welcome { Ok(socket) } else { Err(ErrorKind::ConnectionAborted.into()) };
                }
            }
        }
        Err(ErrorKind::WouldBlock.into())
    }
}

/// Where a rank of this host is reached that listens on `port`, too.
///
/// # Errors
/// `Unsupported` where there are no abstract names.
pub(super) fn on_host(
    secret: &[u8],
    job_id: &[u8; JOB_ID_BYTES],
    rank: Rank,
    port: u16,
) -> io::Result<SockAddr> {
    if cfg!(not(target_os = "linux")) {
        return Err(ErrorKind::Unsupported.into());
    }
    SockAddr::unix(format!("\0{}", name_on_host(secret, job_id, rank, port)))
}
