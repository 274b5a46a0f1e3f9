//! The listing of `ipvsadm` 1.31, byte for byte, for people and scripts that know it.
//!
//! - [`parse`] reads ipvsadm's command line; what changes the table is refused by name
//! - [`list`] and [`save`] format a table (pure)
//! - [`run`] does what a command line asks for with the kernel's table
//!
//! Differences: what changes the table is refused; a name of a host is given up after 3 s, and names of addresses that are not
//! told within 3 s are shown as numbers; no module is loaded; rows of connections are never cut (ipvsadm reads 255 bytes of
//! each); of options that only editing commands take, the values are not checked.

mod args;
mod connections;
mod format;
mod names;
mod sort;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write};
use std::net::IpAddr;
use std::process::ExitCode;

use ipvs_netlink::{
    Client, Error, RealServer, RealServerEntry, VirtualServer, VirtualServerEntry, VirtualServerKey,
};

pub use args::{Command, ListOptions, UsageError, View, parse};
pub use connections::connections;
pub use format::{Header, daemons, list, save, timeouts};
pub use names::Names;

/// A virtual server as listed, with its real servers.
pub type Listed = (VirtualServerEntry, Vec<RealServerEntry>);
/// A virtual server with its real servers.
pub type Saved = (VirtualServer, Vec<RealServer>);

/// Where the kernel lists the connections of the calling thread's network namespace.
const CONNECTIONS: &str = "/proc/thread-self/net/ip_vs_conn";

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
  --connection   -c                   output of current IPVS connections
  --timeout                           output of timeout (tcp tcpfin udp)
  --daemon                            output of daemon information
  --numeric      -n                   numeric output of addresses and ports

The table is only read here; the original ipvsadm changes it.
";

/// Does what ipvsadm's arguments (without the program's name) ask for: writes to standard output
/// and standard error, and returns the exit code, as `ipvsadm` does. Only reads the kernel.
///
/// Without `-n` the name of each address is asked from `getent hosts`, where that program is; what is not answered in
/// time is shown as a number.
#[must_use]
pub fn run(args: &[String]) -> ExitCode {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let written = match answer(args) {
        Ok(Answer::Text(text)) => out.write_all(text.as_bytes()),
        Ok(Answer::Connections { engines, numeric }) => {
            write_connections(engines, numeric, &mut out)
        }
        Err(UsageError { text, exit }) => {
            let _ = writeln!(std::io::stderr(), "{text}");
            return ExitCode::from(exit);
        }
    };
    match written.and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        // A reader such as `head` that has seen enough is no failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "can't list: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a command line is answered with.
enum Answer {
    Text(String),
    /// There may be millions, which are written as they are read.
    Connections {
        engines: bool,
        numeric: bool,
    },
}

fn answer(args: &[String]) -> Result<Answer, UsageError> {
    let command = parse(args, &Names::system())?;
    if let Command::Help = command {
        return Ok(Answer::Text(format!("{VERSION}\n{HELP}")));
    }
    if let Command::Version = command {
        return Ok(Answer::Text(format!("{VERSION}\n")));
    }
    let mut client = Client::open().map_err(no_ipvs)?;
    let text = match command {
        Command::Help | Command::Version => String::new(),
        Command::Save { numeric } => {
            let table = read(&mut client, None)?;
            let names = (!numeric).then(|| names_of(&table));
            let plain = table.into_iter().map(|(server, real_servers)| {
                let plain = real_servers.into_iter().map(|entry| entry.server);
                (server.server, plain.collect())
            });
            save(&plain.collect::<Vec<_>>(), names.as_ref())
        }
        Command::List(options) => {
            let info = client.info().map_err(no_ipvs)?;
            let table = read(&mut client, options.service)?;
            let names = (!options.numeric).then(|| names_of(&table));
            let header = Header {
                version: info.version,
                table_size: info.connection_table_size,
            };
            list(&table, header, &options, names.as_ref())
        }
        Command::Timeouts => timeouts(&client.timeouts().map_err(failed)?),
        Command::Daemons => daemons(&client.sync_daemons().map_err(failed)?),
        Command::Connections { engines, numeric } => {
            client.info().map_err(no_ipvs)?;
            return Ok(Answer::Connections { engines, numeric });
        }
    };
    Ok(Answer::Text(text))
}

fn write_connections(engines: bool, numeric: bool, out: &mut impl Write) -> io::Result<()> {
    let in_file =
        |error: io::Error| io::Error::new(error.kind(), format!("{CONNECTIONS}: {error}"));
    let mut file = File::open(CONNECTIONS).map_err(in_file)?;
    if numeric {
        return connections(BufReader::new(file), engines, None, out);
    }
    // All addresses are needed before the first row can be written.
    let mut rows = String::new();
    file.read_to_string(&mut rows).map_err(in_file)?;
    let names = Names::system().with_hosts(&connections::addresses(&rows));
    connections(rows.as_bytes(), engines, Some(&names), out)
}

fn read(client: &mut Client, service: Option<VirtualServerKey>) -> Result<Vec<Listed>, UsageError> {
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

fn names_of(table: &[Listed]) -> Names {
    let mut addresses: BTreeSet<IpAddr> = BTreeSet::new();
    for (entry, real_servers) in table {
        if let VirtualServerKey::Address { address, .. } = entry.server.key {
            addresses.insert(address);
        }
        addresses.extend(real_servers.iter().map(|entry| entry.server.key.address));
    }
    Names::system().with_hosts(&addresses)
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
