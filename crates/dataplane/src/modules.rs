//! Kernel modules, by `modprobe`: the kernel loads most of them itself when they are asked for, but not all on every
//! release, and in a container only modprobe on the host finds them.

use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ipvs_proxy_iptables::Error;
use ipvs_proxy_iptables::program::{self, Stop};

/// How long modprobe may take before it is killed.
const TIME: Duration = Duration::from_secs(10);
/// How long after a try the next one may be.
const PAUSE: Duration = Duration::from_secs(10);

/// Loads a module, unless the kernel shows that it has it.
///
/// # Errors
/// What modprobe says, or why it can't be run.
pub fn load(name: &str) -> Result<(), String> {
    if Path::new("/sys/module").join(name).exists() {
        return Ok(());
    }
    match program::run("modprobe", &[name], None, TIME, &Stop::default()) {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(said.split_whitespace().collect::<Vec<_>>().join(" "))
        }
        Err(Error::Missing { .. }) => Err("modprobe is not installed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Loads a module while the caller goes on.
#[derive(Debug, Default)]
pub(crate) struct Loading(Option<(Instant, JoinHandle<()>)>);

impl Loading {
    /// Begins, unless it did so a moment ago. What comes of it shows where the module is needed.
    pub(crate) fn begin(&mut self, name: &'static str) {
        if let Some((begun, thread)) = &self.0
            && (begun.elapsed() < PAUSE || !thread.is_finished())
        {
            return;
        }
        let load = move || {
            let loaded = load(name);
            tracing::debug!(module = name, ?loaded, "tried to load a module");
        };
        let thread = thread::Builder::new().name("modprobe".to_owned());
        self.0 = thread
            .spawn(load)
            .ok()
            .map(|thread| (Instant::now(), thread));
    }
}
