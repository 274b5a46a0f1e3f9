//! The deadlines of drains, kept over a restart in a small file.
//!
//! The kernel holds which real servers drain (weight 0); the file holds until when, on the clock that
//! runs since the machine was started and that nobody sets. Without it each deadline begins anew once.
//!
//! It is written by a thread of its own, once a second at most: nobody waits for a file.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use ipvs_netlink::{RealServerKey, VirtualServerKey};
use ipvs_proxy_netlink::Protocol;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::place::replace;

/// A drain with its deadline.
pub type Deadline = (VirtualServerKey, RealServerKey, Instant);

/// How often the file is written at most.
const PAUSE: Duration = Duration::from_secs(1);
/// Another each time that the machine starts.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    boot_id: String,
    drains: Vec<Line>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    address: IpAddr,
    port: u16,
    protocol: u8,
    real_server_address: IpAddr,
    real_server_port: u16,
    /// Milliseconds since the machine was started.
    until_ms: u64,
}

/// The file of deadlines.
#[derive(Debug)]
pub struct Drains {
    file: PathBuf,
    /// The number of the drains as they were handed over last.
    handed_over: u64,
    /// No earlier than this are others.
    next: Option<Instant>,
    /// Others wait for that time.
    waits: bool,
    writer: Option<(SyncSender<Vec<Deadline>>, Receiver<()>)>,
}

impl Drains {
    /// The file at this path; it need not be there.
    #[must_use]
    pub fn new(file: &Path) -> Drains {
        Drains {
            file: file.to_owned(),
            handed_over: 0,
            next: None,
            waits: false,
            writer: None,
        }
    }

    /// The deadlines that an earlier process wrote; none when there is no file, or when the machine was
    /// started since.
    ///
    /// # Errors
    /// When there is a file and it can't be read.
    pub fn read(&self) -> io::Result<Vec<Deadline>> {
        let text = match fs::read(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let content: Content = serde_json::from_slice(&text)?;
        if content.boot_id != boot_id()? {
            return Ok(Vec::new());
        }
        let (now, since_boot) = (Instant::now(), since_boot()?);
        let deadline = |line: Line| {
            let left = Duration::from_millis(line.until_ms).saturating_sub(since_boot);
            let vs = VirtualServerKey::Address {
                address: line.address,
                port: line.port,
                protocol: Protocol::from_number(line.protocol),
            };
            let rs = RealServerKey {
                address: line.real_server_address,
                port: line.real_server_port,
            };
            Some((vs, rs, now.checked_add(left)?))
        };
        Ok(content.drains.into_iter().filter_map(deadline).collect())
    }

    /// Has the deadlines written, unless those with this number were, or it is too early for others.
    pub fn keep(&mut self, number: u64, deadlines: impl FnOnce() -> Vec<Deadline>, now: Instant) {
        self.waits = number != self.handed_over;
        if !self.waits || self.next.is_some_and(|next| now < next) {
            return;
        }
        self.next = Some(now + PAUSE);
        match self
            .writer()
            .map(|(writer, _)| writer.try_send(deadlines()))
        {
            // A disk that hangs: these are late.
            Some(Err(TrySendError::Full(_))) => {}
            Some(Ok(()) | Err(TrySendError::Disconnected(_))) | None => {
                self.handed_over = number;
                self.waits = false;
            }
        }
    }

    /// When there is something to write that had to wait.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.next.filter(|_| self.waits)
    }

    /// Writes the deadlines at the end of the process, if that takes no longer than a second.
    pub fn finish(mut self, number: u64, deadlines: impl FnOnce() -> Vec<Deadline>) {
        let idle = match self.writer.take() {
            None => true,
            Some((writer, ended)) => {
                drop(writer);
                ended.recv_timeout(PAUSE) == Err(mpsc::RecvTimeoutError::Disconnected)
            }
        };
        if idle && number != self.handed_over {
            tell(write(&self.file, &deadlines()).err());
        }
    }

    fn writer(&mut self) -> Option<&(SyncSender<Vec<Deadline>>, Receiver<()>)> {
        if self.writer.is_none() {
            let (writer, deadlines) = mpsc::sync_channel::<Vec<Deadline>>(1);
            let (ends, ended) = mpsc::channel();
            let file = self.file.clone();
            let work = move || {
                let _ends: mpsc::Sender<()> = ends;
                let mut failed = false;
                for deadlines in deadlines {
                    let error = write(&file, &deadlines).err();
                    let told = std::mem::replace(&mut failed, error.is_some());
                    tell(error.filter(|_| !told));
                }
            };
            match thread::Builder::new().name("drains".to_owned()).spawn(work) {
                Ok(_) => self.writer = Some((writer, ended)),
                Err(error) => tell(Some(error)),
            }
        }
        self.writer.as_ref()
    }
}

fn tell(error: Option<io::Error>) {
    if let Some(error) = error {
        warn!(%error, "deadlines of drains could not be kept; a restart begins them anew");
    }
}

/// Replaces the file, in one step.
fn write(file: &Path, drains: &[Deadline]) -> io::Result<()> {
    let (now, since_boot) = (Instant::now(), since_boot()?);
    let line = |(vs, rs, at): &Deadline| {
        let VirtualServerKey::Address {
            address,
            port,
            protocol,
        } = *vs
        else {
            return None;
        };
        let until = since_boot + at.saturating_duration_since(now);
        Some(Line {
            address,
            port,
            protocol: protocol.number(),
            real_server_address: rs.address,
            real_server_port: rs.port,
            until_ms: until.as_millis().try_into().unwrap_or(u64::MAX),
        })
    };
    let drains: Vec<Line> = drains.iter().filter_map(line).collect();
    if drains.is_empty() && !file.exists() {
        return Ok(());
    }
    let boot_id = boot_id()?;
    replace(file, &serde_json::to_vec(&Content { boot_id, drains })?)
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

fn since_boot() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("drains-{name}-{}", std::process::id()))
    }

    fn deadline(port: u16, at: Instant) -> Deadline {
        let vs = VirtualServerKey::Address {
            address: [10, 96, 0, 10].into(),
            port,
            protocol: Protocol::Tcp,
        };
        let rs = RealServerKey {
            address: [10, 0, 0, 2].into(),
            port: 8080,
        };
        (vs, rs, at)
    }

    #[test]
    fn a_deadline_stays_whatever_the_clock_on_the_wall_says() {
        let folder = folder("kept");
        let drains = Drains::new(&folder.join("drains.json"));
        let at = Instant::now() + Duration::from_secs(60);
        write(&drains.file, &[deadline(80, at)]).unwrap();
        let text = fs::read_to_string(&drains.file).unwrap();
        let read = drains.read().unwrap();
        let apart = read[0].2.max(at) - read[0].2.min(at);
        assert!(apart < Duration::from_millis(50), "{apart:?}");
        assert_eq!(read[0], deadline(80, read[0].2));
        let content: Content = serde_json::from_str(&text).unwrap();
        let until = Duration::from_millis(content.drains[0].until_ms);
        let left = until - since_boot().unwrap();
        assert!(left <= Duration::from_secs(60) && left > Duration::from_secs(50));
        // The machine was started since.
        let other = text.replace(&content.boot_id, "of another time");
        fs::write(&drains.file, other).unwrap();
        assert_eq!(drains.read().unwrap(), []);
        fs::write(&drains.file, "[").unwrap();
        assert!(drains.read().is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn drains_that_change_fast_are_written_once_a_second() {
        let folder = folder("fast");
        let mut drains = Drains::new(&folder.join("drains.json"));
        let now = Instant::now();
        let mut collected = 0;
        for n in 1..=1000 {
            let at = now + Duration::from_millis(n);
            let all = || {
                collected += 1;
                vec![deadline(80, now), deadline(81, now)]
            };
            drains.keep(n, all, at);
        }
        assert_eq!(collected, 1);
        assert_eq!(drains.due(), Some(now + Duration::from_millis(1) + PAUSE));
        let mut at = now;
        while let Some(due) = drains.due() {
            assert!(due > at, "{due:?} {at:?}");
            at = due;
            drains.keep(1000, Vec::new, at);
            thread::yield_now();
        }
        let file = drains.file.clone();
        drains.finish(1001, || vec![deadline(443, now)]);
        let left = Drains::new(&file).read().unwrap();
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(
            (left[0].0, left[0].1),
            (deadline(443, now).0, deadline(443, now).1)
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
