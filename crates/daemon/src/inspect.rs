//! The listing of `ipvsadm` 1.31, byte for byte, for people and scripts that know it.
//!
//! - [`parse`] reads ipvsadm's command line; what changes the table is refused by name
//! - [`list`] and [`save`] format a table (pure)
//! - [`run`] does what a command line asks for with the kernel's table
//!
//! Differences: names that are not told within 3 s are shown as numbers; no module is loaded;
//! connections, timeouts and sync daemons are not listed; a persistence mask that is no prefix (`-M 24`, which is 0.0.0.24) is shown as the prefix that
//! [`ipvs_netlink::Persistence`] holds; of options that only editing commands take, the values
//! are not checked.

mod args;
mod format;
mod names;
mod sort;

use std::collections::BTreeSet;
use std::io::Write;
use std::process::ExitCode;

use ipvs_netlink::{Client, Error, RealServer, RealServerEntry, VirtualServer, VirtualServerEntry};

pub use args::{Command, ListOptions, UsageError, View, parse};
pub use format::{Header, list, save};
pub use names::Names;

/// A virtual server as listed, with its real servers.
pub type Listed = (VirtualServerEntry, Vec<RealServerEntry>);
/// A virtual server with its real servers.
pub type Saved = (VirtualServer, Vec<RealServer>);

const VERSION: &str = concat!(
    "ipvsadm v1.31 compatible listing of ipvs-proxy ",
    env!("CARGO_PKG_VERSION"),
    " (IPVS v1.2.1)"
);

const HELP: &str = "\
Usage:
  ipvsadm -L|l [virtual-service] [options]
  ipvsadm -S [-n]
  ipvsadm -h

Commands:
Either long or short options are allowed.
  --save            -S        save rules to stdout
  --list            -L|-l     list the table
  --help            -h        display this help message

virtual-service:
  --tcp-service|-t  service-address   service-address is host[:port]
  --udp-service|-u  service-address   service-address is host[:port]
  --sctp-service    service-address   service-address is host[:port]
  --fwmark-service|-f fwmark          fwmark is an integer greater than zero

Options:
  --ipv6         -6                   fwmark entry uses IPv6
  --stats                             output of statistics information
  --rate                              output of rate information
  --exact        -X                   expand numbers (display exact values)
  --thresholds                        output of thresholds information
  --persistent-conn                   output of persistent connection info
  --tun-info                          output of tunnel information
  --nosort                            disable sorting output of service/server entries
  --sort                              does nothing, for backwards compatibility
  --numeric      -n                   numeric output of addresses and ports

The table is only read here; the real ipvsadm changes it.
";

/// Does what ipvsadm's arguments (without the program's name) ask for: writes to standard output
/// and standard error, and returns the exit code, as `ipvsadm` does. Only reads the kernel.
///
/// Without `-n` the name of each address is asked from `getent hosts`, where that program is; what is not answered in
/// time is shown as a number.
#[must_use]
pub fn run(args: &[String]) -> ExitCode {
    let outcome = answer(args);
    let (text, code) = match outcome {
        Ok(text) => (text, 0),
        Err(UsageError { text, exit }) => {
            let _ = writeln!(std::io::stderr(), "{text}");
            (String::new(), exit)
        }
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::from(code),
        // A reader such as `head` that has seen enough is no failure.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::from(code),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "can't write: {error}");
            ExitCode::FAILURE
        }
    }
}

fn answer(args: &[String]) -> Result<String, UsageError> {
    match parse(args, &Names::system())? {
        Command::Help => Ok(format!("{VERSION}\n{HELP}")),
        Command::Version => Ok(format!("{VERSION}\n")),
        Command::Save { numeric } => {
            let mut client = Client::open().map_err(no_ipvs)?;
            let table = read(&mut client, None)?;
            let names = names(&table, numeric);
            let plain = table.into_iter().map(|(server, real_servers)| {
                (
                    server.server,
                    real_servers.into_iter().map(|entry| entry.server).collect(),
                )
            });
            Ok(save(&plain.collect::<Vec<_>>(), names.as_ref()))
        }
        Command::List(options) => {
            let mut client = Client::open().map_err(no_ipvs)?;
            let info = client.info().map_err(no_ipvs)?;
            let table = read(&mut client, options.service)?;
            let names = names(&table, options.numeric);
            let header = Header {
                version: info.version,
                table_size: info.connection_table_size,
            };
            Ok(list(&table, header, &options, names.as_ref()))
        }
    }
}

fn read(
    client: &mut Client,
    service: Option<ipvs_netlink::VirtualServerKey>,
) -> Result<Vec<Listed>, UsageError> {
    let servers = match service {
        None => client.virtual_servers().map_err(failed)?,
        Some(key) => match client.virtual_server(key).map_err(failed)? {
            Some(entry) => vec![entry],
            None => {
                return Err(UsageError {
                    text: "No such service".to_owned(),
                    exit: 1,
                });
            }
        },
    };
    let with_real_servers = |entry: VirtualServerEntry| {
        let real_servers = client.real_servers(entry.server.key).map_err(failed)?;
        Ok((entry, real_servers))
    };
    servers.into_iter().map(with_real_servers).collect()
}

fn names(table: &[Listed], numeric: bool) -> Option<Names> {
    let addresses: BTreeSet<_> = table
        .iter()
        .flat_map(|(entry, real_servers)| {
            let vip = match entry.server.key {
                ipvs_netlink::VirtualServerKey::Address { address, .. } => Some(address),
                ipvs_netlink::VirtualServerKey::FirewallMark { .. } => None,
            };
            vip.into_iter()
                .chain(real_servers.iter().map(|entry| entry.server.key.address))
        })
        .collect();
    (!numeric).then(|| Names::system().with_hosts(&addresses))
}

/// The words of libipvs (`ipvs_strerror`) for a client that can't be used at all.
fn no_ipvs(error: Error) -> UsageError {
    let why = match error {
        Error::NoModule => "Protocol not available".to_owned(),
        Error::Permission { .. } => "Permission denied (you must be root)".to_owned(),
        other => other.to_string(),
    };
    let text = format!(
        "Can't initialize ipvs: {why}\n\
         Are you sure that IP Virtual Server is built in the kernel or as module?"
    );
    UsageError { text, exit: 2 }
}

fn failed(error: Error) -> UsageError {
    match error {
        Error::Permission { .. } => no_ipvs(error),
        other => UsageError {
            text: other.to_string(),
            exit: 1,
        },
    }
}

#[cfg(test)]
mod tests;
