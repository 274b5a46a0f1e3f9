//! Runs one command in a guest kernel (user-mode Linux) that has IPVS, whatever the host's kernel has.
//!
//! ```text
//! guest [-t SECONDS] [-m MEMORY] [-M MODULES] [-e NAME=VALUE]... [-x KERNEL-ARGUMENT]... [--tty]
//!       [--kernel FILE] [--modules FOLDER] [--no-overlay] -- COMMAND [ARGUMENT]...
//! ```
//!
//! The guest sees the host's file system; what it writes stays in its memory. Standard output and error come back as they are
//! written, and the command's exit code (128+n for signal n) becomes this program's. 124: the command
//! hung and was ended; what the guest looked like is on standard error. 125: there is no result, because the guest failed.
//!
//! iptables is the legacy one, since Debian's user-mode Linux has no nf_tables; with `-x GUEST_IPTABLES_NFT=1`, for a kernel that
//! has it, it is the one that the host has chosen.
//!
//! `--kernel` and `--modules` name another user-mode Linux and the folder that holds its modules, below the release's name.
//! `--no-overlay` shows the host's files read-only, for kernels whose overlay fails on them (Linux 5.10 loses files at random):
//! writable are /run and /etc/alternatives; `TMPDIR` names a folder in /run, modules load by a modprobe of the guest's own.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{Pid, geteuid, mkdtemp};

const KERNEL: &str = "/usr/bin/linux.uml";
/// See guest/xstate.c.
const XSTATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/xstate.so"));
const ALL_MODULES: &str = "/usr/lib/uml/modules";
const SECONDS: u64 = 60;
const MEMORY: &str = "256M";
/// What the tests and the daemon use; everything else loads on demand, at ten times the time.
const MODULES: &str = "ip_vs ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_sh ip_vs_dh ip_vs_mh ip_vs_sed ip_vs_nq \
    dummy veth bridge br_netfilter ip_set ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet \
    ip_set_hash_ip ip_set_hash_net ip_set_bitmap_port xt_set iptable_nat iptable_filter ip6table_nat ip6table_filter \
    xt_MASQUERADE xt_mark xt_comment xt_conntrack xt_ipvs xt_addrtype xt_nat xt_tcpudp nf_conntrack_netlink \
    ipt_REJECT ip6t_REJECT xt_physdev";
/// The first three save a second of boot: a RAID benchmark, 256 old terminals, the delay loop's calibration.
const KERNEL_ARGUMENTS: [&str; 9] = [
    "initcall_blacklist=raid6_select_algo,raid6_init",
    "pty.legacy_count=0",
    "lpj=25526272",
    "root=/dev/root",
    "rootfstype=hostfs",
    "rootflags=/",
    "ro",
    "quiet",
    "con=null",
];
/// The guest ends a hung command itself and leaves evidence; the host waits this much longer before it ends the guest.
const GRACE: Duration = Duration::from_secs(15);
const NO_RESULT: u8 = 125;

struct Options {
    seconds: u64,
    memory: String,
    modules: String,
    environment: Vec<OsString>,
    kernel_arguments: Vec<OsString>,
    tty: bool,
    kernel: PathBuf,
    all_modules: PathBuf,
    overlay: bool,
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    match options().and_then(|options| run(&options)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("guest: {error:#}");
            ExitCode::from(NO_RESULT)
        }
    }
}

fn options() -> Result<Options> {
    let mut options = Options {
        seconds: SECONDS,
        memory: MEMORY.into(),
        modules: MODULES.into(),
        environment: Vec::new(),
        kernel_arguments: Vec::new(),
        tty: false,
        kernel: KERNEL.into(),
        all_modules: ALL_MODULES.into(),
        overlay: true,
        command: Vec::new(),
    };
    let mut arguments = std::env::args_os().skip(1);
    while let Some(option) = arguments.next() {
        let name = option.to_str().unwrap_or_default();
        if name == "--" {
            break;
        }
        if !name.starts_with('-') {
            options.command.push(option);
            break;
        }
        if name == "--tty" {
            options.tty = true;
            continue;
        }
        if name == "--no-overlay" {
            options.overlay = false;
            continue;
        }
        let value = arguments
            .next()
            .with_context(|| format!("{name} needs a value"))?;
        let text = value.to_string_lossy().into_owned();
        match name {
            "-t" => options.seconds = text.parse().context("-t needs seconds")?,
            "-m" => options.memory = text,
            "-M" => options.modules = text,
            "-e" => options.environment.push(value),
            "-x" => options.kernel_arguments.push(value),
            "--kernel" => options.kernel = absolute(Path::new(&value))?,
            "--modules" => options.all_modules = absolute(Path::new(&value))?,
            _ => bail!("unknown option {name}"),
        }
    }
    options.command.extend(arguments);
    if options.command.is_empty() {
        bail!(
            "usage: guest [-t seconds] [-m memory] [-M modules] [-e name=value] [-x kernel-argument] [--tty] \
             [--kernel file] [--modules folder] [--no-overlay] -- command"
        );
    }
    Ok(options)
}

fn run(options: &Options) -> Result<u8> {
    if !options.kernel.exists() {
        bail!(
            "{} is missing: install the package user-mode-linux",
            options.kernel.display()
        );
    }
    let interrupted = Arc::new(AtomicI32::new(0));
    watch_signals(Arc::clone(&interrupted))?; // before any other thread exists: they inherit the mask
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    let out = mkdtemp(&std::env::temp_dir().join("guest.XXXXXX"))
        .context("making the exchange directory")?;
    let result = write_request(options, &out)
        .and_then(|()| watch(options, &out, &interrupted))
        .and_then(|status| report(&out, &status, &interrupted));
    // What stays behind is a few files in the temporary directory; that is no reason to fail a test.
    let _ = fs::remove_dir_all(&out);
    result
}

/// The signals that must end the guest first and this program after it.
fn ending_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
        .into_iter()
        .collect()
}

fn watch_signals(interrupted: Arc<AtomicI32>) -> Result<()> {
    ending_signals().thread_block()?;
    thread::spawn(move || {
        if let Ok(signal) = ending_signals().wait() {
            interrupted.store(signal as i32, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// Arguments and environment go by file: the kernel's command line holds 2 KB and no blanks.
fn write_request(options: &Options, out: &Path) -> Result<()> {
    let mut environment: Vec<OsString> = vec![
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into(),
        "HOME=/root".into(),
        "USER=root".into(),
        "LANG=C.UTF-8".into(),
    ];
    let inherited = std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_") || name.starts_with("RUST_") || name == "TERM"
    });
    environment.extend(inherited.map(|(mut variable, value)| {
        variable.push("=");
        variable.push(value);
        variable
    }));
    environment.extend(options.environment.iter().cloned());
    fs::write(out.join("argv"), zero_terminated(&options.command))?;
    fs::write(out.join("env"), zero_terminated(&environment))?;
    fs::write(out.join("mods"), &options.modules)?;
    fs::write(
        out.join("cwd"),
        std::env::current_dir()?.as_os_str().as_bytes(),
    )?;
    File::create(out.join("stdout"))?;
    File::create(out.join("stderr"))?;
    Ok(())
}

fn zero_terminated(words: &[OsString]) -> Vec<u8> {
    words
        .iter()
        .flat_map(|word| word.as_bytes().iter().copied().chain([0]))
        .collect()
}

/// Starts the guest, passes its output on, ends it when it has to.
fn watch(options: &Options, out: &Path, interrupted: &AtomicI32) -> Result<ExitStatus> {
    let (sender, started) = mpsc::channel();
    let mut command = uml(options, out)?;
    let fenced = out.to_owned();
    let memory = memory_folder(options);
    // A thread of its own: processor, mount namespace and parent-death signal belong to the thread that starts a process.
    let guest = thread::spawn(move || -> Result<ExitStatus> {
        pin().context("choosing a processor")?;
        let memory = memory.as_deref().unwrap_or(&fenced);
        if geteuid().is_root() {
            // Without the right to do that (a container) the guest's own read-only view has to be enough.
            let _ = fence(&fenced, memory);
        }
        // A process inherits the mask, and the guest has to hear SIGTERM.
        ending_signals().thread_unblock()?;
        let spawned = command.env("TMPDIR", memory).spawn();
        ending_signals().thread_block()?;
        let mut child = spawned.context("starting setpriv (package util-linux)")?;
        let _ = sender.send(child.id());
        Ok(child.wait()?)
    });
    let group = match started.recv() {
        Ok(pid) => Pid::from_raw(-i32::try_from(pid)?),
        Err(_) => {
            return guest
                .join()
                .unwrap_or_else(|_| bail!("the guest's thread panicked"));
        }
    };
    let mut streams: [(File, &mut dyn Write); 2] = [
        (File::open(out.join("stdout"))?, &mut io::stdout()),
        (File::open(out.join("stderr"))?, &mut io::stderr()),
    ];
    let deadline = Instant::now() + Duration::from_secs(options.seconds) + GRACE;
    let mut ended: Option<Instant> = None;
    loop {
        let finished = guest.is_finished(); // before the copy, so that the last bytes are not missed
        for (from, to) in &mut streams {
            copy_new(from, to)?;
        }
        if finished {
            return guest
                .join()
                .unwrap_or_else(|_| bail!("the guest's thread panicked"));
        }
        let now = Instant::now();
        match ended {
            // SIGTERM lets user-mode Linux take its helper processes along; SIGKILL must name the whole group.
            None if now > deadline && !options.tty || interrupted.load(Ordering::Relaxed) != 0 => {
                eprintln!("guest: ending it");
                let _ = kill(group, Signal::SIGTERM);
                ended = Some(now);
            }
            Some(since) if now > since + Duration::from_secs(3) => {
                let _ = kill(group, Signal::SIGKILL);
            }
            _ => {}
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// `setpriv` gives the guest a signal for our death, however sudden; an interactive one gets a terminal from `script`,
/// because user-mode Linux leaves the process group that owns ours.
fn uml(options: &Options, out: &Path) -> Result<Command> {
    let init = std::env::current_exe()?.with_file_name("guest-init");
    if !init.exists() {
        bail!("{} is missing: build the package `tests`", init.display());
    }
    let mut words: Vec<OsString> = vec![options.kernel.clone().into()];
    words.extend(KERNEL_ARGUMENTS.iter().map(OsString::from));
    words.push(format!("mem={}", options.memory).into());
    words.push(
        if options.tty {
            "con0=fd:0,fd:1"
        } else {
            "con0=null,fd:1"
        }
        .into(),
    );
    words.push(assignment("init", init.as_os_str()));
    words.push(assignment("uml_dir", out.as_os_str()));
    words.push("umid=guest".into());
    words.push(assignment("GUEST_OUT", out.as_os_str()));
    words.push(assignment("GUEST_MODULES", options.all_modules.as_os_str()));
    if !options.overlay {
        words.push("GUEST_NO_OVERLAY=1".into());
    }
    if options.tty {
        words.extend(["GUEST_TTY=1".into(), "loglevel=1".into()]);
    } else {
        words.push(format!("GUEST_SECONDS={}", options.seconds).into());
    }
    words.extend(options.kernel_arguments.iter().cloned());
    if words.iter().any(|word| word.as_bytes().contains(&b' ')) {
        bail!("no blanks in the paths of the temporary and target directories, please: {words:?}");
    }
    let preload = out.join("xstate.so");
    fs::write(&preload, XSTATE)?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]);
    command.env("LD_PRELOAD", &preload);
    if options.tty {
        let line = words.join(OsStr::new(" "));
        command
            .args(["script", "--quiet", "--command"])
            .arg(line)
            .arg("/dev/null");
    } else {
        let console = File::create(out.join("console"))?;
        command.args(words).stdin(Stdio::null()).process_group(0);
        command.stdout(console.try_clone()?).stderr(console);
    }
    Ok(command)
}

fn assignment(name: &str, value: &OsStr) -> OsString {
    let mut word = OsString::from(name);
    word.push("=");
    word.push(value);
    word
}

/// One processor: otherwise every system call of the guest wakes another one, four times as slow.
fn pin() -> Result<()> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let all: Vec<usize> = (0..CpuSet::count())
        .filter(|cpu| allowed.is_set(*cpu).unwrap_or(false))
        .collect();
    let turn = usize::try_from(std::process::id())? % all.len().max(1);
    let mut one = CpuSet::new();
    one.set(*all.get(turn).context("no processor is allowed")?)?;
    sched_setaffinity(Pid::from_raw(0), &one)?;
    Ok(())
}

/// Where the guest's memory lives: /dev/shm when it is executable, big enough and a file system of its own (a container's
/// often is none of it), else the exchange directory.
fn memory_folder(options: &Options) -> Option<PathBuf> {
    let shm = statvfs("/dev/shm").ok()?;
    let root = statvfs("/").ok()?;
    let usable = !shm
        .flags()
        .intersects(FsFlags::ST_NOEXEC | FsFlags::ST_RDONLY)
        && shm.filesystem_id() != root.filesystem_id()
        && shm.blocks_available().saturating_mul(shm.fragment_size()) > bytes(&options.memory)?;
    usable.then(|| PathBuf::from("/dev/shm"))
}

fn bytes(memory: &str) -> Option<u64> {
    let digits = memory.trim_end_matches(|unit: char| !unit.is_ascii_digit());
    let shift = match memory.strip_prefix(digits)? {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_shl(shift)
}

/// Makes everything read-only for the guest's process but its memory and the exchange directory: root in the guest can
/// mount the host's file system again, and here is also root on the host.
fn fence(out: &Path, memory: &Path) -> Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
    mount(Some(out), out, NONE, MsFlags::MS_BIND, NONE)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    for point in mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(Path::new)
    {
        if point != out && point != memory {
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
            let _ = mount(NONE, point, NONE, flags, NONE); // hidden and unreachable ones
        }
    }
    Ok(())
}

fn copy_new(from: &mut File, to: &mut dyn Write) -> Result<()> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    if !bytes.is_empty() {
        to.write_all(&bytes)?;
        to.flush()?;
    }
    Ok(())
}

fn report(out: &Path, status: &ExitStatus, interrupted: &AtomicI32) -> Result<u8> {
    if let Ok(state) = fs::read(out.join("hung")) {
        io::stderr().write_all(&state)?;
    }
    let signal = interrupted.load(Ordering::Relaxed);
    if signal != 0 {
        return Ok(u8::try_from(128 + signal)?);
    }
    let code = fs::read_to_string(out.join("rc"))
        .ok()
        .and_then(|code| code.trim().parse().ok());
    let console = fs::read(out.join("console")).unwrap_or_default();
    let console = String::from_utf8_lossy(&console);
    let console = console.trim();
    let Some(code) = code else {
        let tail: Vec<&str> = console.lines().rev().take(60).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        bail!(
            "the guest gave no result ({status}); its console said:\n{}",
            tail.join("\n")
        );
    };
    // `quiet` leaves warnings and worse: a module that failed, a kernel that complains.
    if !console.is_empty() && std::env::var_os("GUEST_CONSOLE").is_some() {
        eprintln!("{console}");
    }
    Ok(code)
}
