//! The deadlines of drains, kept over a restart in a small file.
//!
//! The kernel holds which real servers drain (weight 0); the file holds until when. Without it
//! each deadline begins anew once.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;
use serde::{Deserialize, Serialize};

/// A drain with its deadline.
pub type Deadline = (VirtualServerKey, RealServerKey, Instant);

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    address: IpAddr,
    port: u16,
    protocol: u8,
    real_server_address: IpAddr,
    real_server_port: u16,
    /// Milliseconds since 1970.
    until_ms: u64,
}

/// The file of deadlines.
#[derive(Debug)]
pub struct Drains {
    file: PathBuf,
}

impl Drains {
    /// The file at this path; it need not be there.
    #[must_use]
    pub fn new(file: &Path) -> Drains {
        Drains {
            file: file.to_owned(),
        }
    }

    /// The deadlines that an earlier process wrote; none when there is no file.
    ///
    /// # Errors
    /// When there is a file and it can't be read.
    pub fn read(&self, now: Instant) -> io::Result<Vec<Deadline>> {
        let text = match fs::read(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let lines: Vec<Line> = serde_json::from_slice(&text)?;
        let wall = SystemTime::now();
        Ok(lines
            .into_iter()
            .map(|line| {
                let until = UNIX_EPOCH + Duration::from_millis(line.until_ms);
                let left = until.duration_since(wall).unwrap_or_default();
                let vs = VirtualServerKey::Address {
                    address: line.address,
                    port: line.port,
                    protocol: Protocol::from_number(line.protocol),
                };
                let rs = RealServerKey {
                    address: line.real_server_address,
                    port: line.real_server_port,
                };
                (vs, rs, now + left)
            })
            .collect())
    }

    /// Replaces the file, in one step.
    ///
    /// # Errors
    /// When the folder or the file can't be written.
    pub fn write(&self, drains: impl Iterator<Item = Deadline>, now: Instant) -> io::Result<()> {
        let wall = SystemTime::now();
        let lines: Vec<Line> = drains
            .filter_map(|(vs, rs, at)| {
                let VirtualServerKey::Address {
                    address,
                    port,
                    protocol,
                } = vs
                else {
                    return None;
                };
                let until = wall + at.saturating_duration_since(now);
                let since_1970 = until.duration_since(UNIX_EPOCH).unwrap_or_default();
                Some(Line {
                    address,
                    port,
                    protocol: protocol.number(),
                    real_server_address: rs.address,
                    real_server_port: rs.port,
                    until_ms: since_1970.as_millis().try_into().unwrap_or(u64::MAX),
                })
            })
            .collect();
        if lines.is_empty() && !self.file.exists() {
            return Ok(());
        }
        if let Some(folder) = self.file.parent() {
            fs::create_dir_all(folder)?;
        }
        let new = self.file.with_extension("new");
        fs::write(&new, serde_json::to_vec(&lines)?)?;
        fs::rename(new, &self.file)
    }
}
