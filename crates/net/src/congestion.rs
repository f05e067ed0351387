//! Which congestion control the connections use.
//!
//! A slice needs all of a rank's connections: the slowest decides. BBR's first version, which many systems have made their
//! default, almost stops each connection for 200 ms every ten seconds to measure the round trip, one after the other, and shares
//! a link unevenly between connections for seconds. ResNet-50 on 4 hosts at 600 Mbit/s took 1.125 of the least time with it and
//! 1.012 with cubic (`docs/benchmarks/lab/resnet50-600.jsonl`). So where it is the default, cubic is used, or reno, which every program may
//! choose; any other default is left as it is.
//!
//! It is set before a socket connects, or listens for those that are accepted ([`set`]): what has been BBR's for a moment Linux
//! paces by timers for good, whatever it uses then. A lane that sends and receives 32 MB in a step spent 13 ms of it in the kernel
//! that way, and spends 9 (`docs/benchmarks/others.md`).

use crate::failure::Failure;
use socket2::{Domain, Socket, Type};
use std::io;

const AVOIDED: &str = "bbr";
const INSTEAD: [&str; 2] = ["cubic", "reno"];

/// What to set on every connection; `None` leaves the system's.
///
/// `wanted` is a name, `system`, or `auto`.
///
/// # Errors
/// `Config` if the name cannot be used here.
#[cfg(target_os = "linux")]
pub(crate) fn choose(wanted: &str) -> Result<Option<String>, Failure> {
    let usable = |name: &str| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_tcp_congestion(name.as_bytes())
    };
    match wanted {
        "system" => Ok(None),
        "auto" => {
            // Unknown is as good as harmless.
            let default = Socket::new(Domain::IPV4, Type::STREAM, None).and_then(|s| s.tcp_congestion());
            let default = default.unwrap_or_default();
            let name = String::from_utf8_lossy(&default);
            if name.trim_end_matches('\0') != AVOIDED {
                return Ok(None);
            }
            Ok(INSTEAD.into_iter().find(|name| usable(name).is_ok()).map(Into::into))
        }
        name => usable(name).map(|()| Some(name.into())).map_err(|error| {
            Failure::config(format!(
                "congestion control {name:?} cannot be used here ({error}); `sysctl net.ipv4.tcp_allowed_congestion_control` \
                 lists what can, \"system\" leaves the choice to the system, \"auto\" only avoids {AVOIDED}"
            ))
        }),
    }
}

/// Sets what [`choose`] has chosen on a socket that is not connected yet. A listener's goes over to those it accepts.
///
/// # Errors
/// What the system said.
#[cfg(target_os = "linux")]
pub(crate) fn set(socket: &Socket, chosen: Option<&str>) -> io::Result<()> {
    chosen.map_or(Ok(()), |name| socket.set_tcp_congestion(name.as_bytes()))
}

/// What to set on every connection: nothing, the system's own is used.
///
/// # Errors
/// `Config` if a name was given.
#[cfg(not(target_os = "linux"))]
pub(crate) fn choose(wanted: &str) -> Result<Option<String>, Failure> {
    match wanted {
        "system" | "auto" => Ok(None),
        name => Err(Failure::config(format!("congestion control {name:?}: it can be chosen on Linux only"))),
    }
}

/// There is nothing to set.
#[cfg(not(target_os = "linux"))]
pub(crate) fn set(_: &Socket, _: Option<&str>) -> io::Result<()> {
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_checked_and_bbr_is_avoided() {
        assert_eq!(choose("system").unwrap(), None);
        assert_eq!(choose("reno").unwrap().as_deref(), Some("reno"), "every Linux has it");
        let text = choose("no-such-thing").unwrap_err().to_string();
        assert!(text.contains("no-such-thing") && text.contains("tcp_allowed_congestion_control"), "{text}");
        let default = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap().tcp_congestion().unwrap();
        let avoided = String::from_utf8_lossy(&default).trim_end_matches('\0') == AVOIDED;
        let chosen = choose("auto").unwrap();
        assert_eq!(chosen.as_deref().is_some_and(|name| INSTEAD.contains(&name)), avoided, "{chosen:?}");
    }
}
