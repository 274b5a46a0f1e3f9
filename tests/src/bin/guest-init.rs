//! The guest's first process: builds the guest's view of the host, runs one command, writes down how it ended, powers off.
//!
//! The exchange directory is named by `GUEST_OUT` (a word of the kernel's command line that arrives as environment). It
//! holds `argv`, `env` (both zero-terminated words), `mods` and `cwd`; here `stdout`, `stderr`, `hung` and at last `rc` are written.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::sys::utsname::uname;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, pivot_root, sethostname};

const OUT: &str = "/run/out";
/// Temporary files of a guest whose root is read-only; the host's own folder stays visible, the tests' programs may be in it.
const TEMPORARY: &str = "/run/tmp";
/// Programs that stand before the host's in a guest whose root is read-only.
const PROGRAMS: &str = "/run/programs";
/// Where Debian's iptables has its links to one of its two programs.
const CHOICES: &str = "/etc/alternatives";
const HUNG: i32 = 124;

fn main() {
    if let Err(error) = run() {
        eprintln!("guest-init: {error:#}");
    }
    nix::unistd::sync();
    let _ = reboot(RebootMode::RB_POWER_OFF);
}

fn run() -> Result<()> {
    let out = std::env::var_os("GUEST_OUT").context("no GUEST_OUT")?;
    let all_modules = std::env::var_os("GUEST_MODULES").context("no GUEST_MODULES")?;
    let release = uname()?.release().to_owned();
    let folder = Path::new(&all_modules).join(&release);
    let mut modules = Modules::of(folder.clone());
    if read_only() {
        make_writable(Path::new(CHOICES))?;
    } else {
        modules.load("overlay");
        enter_overlay()?;
    }
    mount_all(Path::new(&out))?;
    if read_only() {
        lead_to_modules(&folder, &release)?;
    } else {
        show_modules(&folder, &Path::new("/lib/modules").join(&release));
    }
    if std::env::var_os("GUEST_IPTABLES_NFT").is_none() {
        prefer_legacy_iptables();
    }
    sethostname("guest")?;
    tests::netns::loopback_up()?;
    for name in fs::read_to_string(Path::new(OUT).join("mods"))?.split_whitespace() {
        modules.load(name);
    }
    // A namespace is quicker made than IPv6 finds out that nobody else has its link-local address.
    sysctl("net/core/devconf_inherit_init_net", "1");
    sysctl("net/ipv6/conf/default/accept_dad", "0");
    let code = run_command()?;
    fs::write(Path::new(OUT).join("rc.tmp"), code.to_string())?;
    fs::rename(Path::new(OUT).join("rc.tmp"), Path::new(OUT).join("rc"))?;
    Ok(())
}

/// The host's files below, memory above: everything may be written, nothing reaches the host.
fn enter_overlay() -> Result<()> {
    attach("tmpfs", "/mnt", "mode=755")?;
    for folder in ["/mnt/upper", "/mnt/work", "/mnt/root"] {
        fs::create_dir(folder)?;
    }
    attach(
        "overlay",
        "/mnt/root",
        "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work",
    )?;
    mount(
        Some("/dev"),
        "/mnt/root/dev",
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .context("binding /dev")?;
    fs::create_dir_all("/mnt/root/oldroot")?;
    std::env::set_current_dir("/mnt/root")?;
    pivot_root(".", "oldroot").context("changing the root")?;
    std::env::set_current_dir("/")?;
    // The overlay keeps what it needs; nobody else shall find the host's root and mount it writable.
    umount2("/oldroot", MntFlags::MNT_DETACH).context("leaving the old root")?;
    let _ = fs::remove_dir("/oldroot");
    Ok(())
}

/// Whether the host's files are shown as they are, without an overlay.
fn read_only() -> bool {
    std::env::var_os("GUEST_NO_OVERLAY").is_some()
}

/// Puts memory over a folder, if there is one, with the links that it held.
fn make_writable(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let entries = fs::read_dir(folder)?.flatten();
    let links: Vec<(PathBuf, PathBuf)> = entries
        .filter_map(|entry| Some((fs::read_link(entry.path()).ok()?, entry.path())))
        .collect();
    mount(
        Some("tmpfs"),
        folder,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=755"),
    )?;
    for (to, link) in links {
        symlink(to, link)?;
    }
    Ok(())
}

fn mount_all(out: &Path) -> Result<()> {
    attach("proc", "/proc", "")?;
    attach("sysfs", "/sys", "")?;
    attach("tmpfs", "/run", "mode=755")?;
    for folder in [
        "/dev/pts",
        "/dev/shm",
        "/run/netns",
        "/run/lock",
        TEMPORARY,
        OUT,
    ] {
        fs::create_dir_all(folder)?;
    }
    attach("devpts", "/dev/pts", "")?;
    attach("tmpfs", "/dev/shm", "mode=1777")?;
    mount(
        Some("none"),
        OUT,
        Some("hostfs"),
        MsFlags::empty(),
        Some(out),
    )
    .context("mounting the exchange directory")
}

fn attach(kind: &str, at: &str, options: &str) -> Result<()> {
    mount(Some(kind), at, Some(kind), MsFlags::empty(), Some(options))
        .with_context(|| format!("mounting {at}"))
}

/// Where the kernel's own requests and modprobe look.
fn show_modules(from: &Path, to: &Path) {
    let shown = fs::create_dir_all(to)
        .map_err(|error| error.to_string())
        .and_then(|()| {
            mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .map_err(|error| error.to_string())
        });
    if let Err(error) = shown {
        eprintln!("guest-init: {}: {error}", to.display());
    }
}

/// A modprobe that looks elsewhere than in /lib/modules, which the host may not even have; for the kernel's own requests and,
/// by `PATH`, for everybody else.
fn lead_to_modules(folder: &Path, release: &OsStr) -> Result<()> {
    let modules = Path::new("/run/kernel/lib/modules");
    fs::create_dir_all(modules)?;
    symlink(folder, modules.join(release))?;
    fs::create_dir(PROGRAMS)?;
    let modprobe = Path::new(PROGRAMS).join("modprobe");
    fs::write(
        &modprobe,
        "#!/bin/sh\nexec /sbin/modprobe --dirname /run/kernel \"$@\"\n",
    )?;
    fs::set_permissions(&modprobe, Permissions::from_mode(0o755))?;
    fs::write("/proc/sys/kernel/modprobe", modprobe.as_os_str().as_bytes())
        .context("naming modprobe to the kernel")
}

/// Debian's iptables speaks nf_tables, its user-mode Linux does not.
fn prefer_legacy_iptables() {
    for tool in ["iptables", "ip6tables"] {
        for action in ["", "-save", "-restore"] {
            let legacy = PathBuf::from(format!("/usr/sbin/{tool}-legacy{action}"));
            let choice = Path::new(CHOICES).join(format!("{tool}{action}"));
            if legacy.exists() && fs::remove_file(&choice).is_ok() {
                let _ = symlink(legacy, choice);
            }
        }
    }
}

fn sysctl(name: &str, value: &str) {
    if let Err(error) = fs::write(Path::new("/proc/sys").join(name), value) {
        eprintln!("guest-init: {name}: {error}");
    }
}

/// Loads modules from their index directly: starting modprobe for each takes twenty times as long.
struct Modules {
    folder: PathBuf,
    index: String,
    loaded: BTreeSet<String>,
}

impl Modules {
    /// A kernel without modules has no index; loading then does nothing.
    fn of(folder: PathBuf) -> Self {
        let index = fs::read_to_string(folder.join("modules.dep")).unwrap_or_default();
        Self {
            folder,
            index,
            loaded: BTreeSet::new(),
        }
    }

    fn load(&mut self, name: &str) {
        if self.index.is_empty() {
            return;
        }
        let plain = |text: &str| text.replace('-', "_");
        let line = self
            .index
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(path, _)| {
                let file = path.rsplit('/').next().unwrap_or(path);
                file.split('.')
                    .next()
                    .is_some_and(|stem| plain(stem) == plain(name))
            });
        let Some((path, needs)) = line else {
            return eprintln!("guest-init: module {name}: not found");
        };
        // The index names what must come first last.
        for path in needs.split_whitespace().rev().chain([path]) {
            if self.loaded.insert(path.to_owned())
                && let Err(error) = insert(&self.folder.join(path))
            {
                eprintln!("guest-init: module {path}: {error:#}");
            }
        }
    }
}

fn insert(path: &Path) -> Result<()> {
    match finit_module(File::open(path)?, c"", ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Runs the command to its end, reaping orphans meanwhile; gives its exit code.
fn run_command() -> Result<i32> {
    let mut command = command()?;
    let child = match command.spawn() {
        Ok(child) => Pid::from_raw(i32::try_from(child.id())?),
        Err(error) => {
            let text = format!("guest-init: {}: {error}\n", command.get_program().display());
            OpenOptions::new()
                .append(true)
                .open(Path::new(OUT).join("stderr"))?
                .write_all(text.as_bytes())?;
            return Ok(if error.kind() == ErrorKind::NotFound {
                127
            } else {
                126
            });
        }
    };
    let hung = Arc::new(AtomicBool::new(false));
    if let Some(seconds) = std::env::var("GUEST_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok())
    {
        let hung = Arc::clone(&hung);
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(seconds));
            hung.store(true, Ordering::SeqCst);
            if let Err(error) = describe(seconds) {
                eprintln!("guest-init: describing the hung command: {error:#}");
            }
            let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
        });
    }
    loop {
        let code = match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == child => code,
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => 128 + signal as i32,
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        return Ok(if hung.load(Ordering::SeqCst) {
            HUNG
        } else {
            code
        });
    }
}

fn command() -> Result<Command> {
    let words = fs::read(Path::new(OUT).join("argv"))?;
    let mut words = zero_terminated(&words);
    let program = words.next().context("no command")?;
    let mut command = if std::env::var_os("GUEST_TTY").is_some() {
        // /dev/console is nobody's controlling terminal; without one a shell has no job control.
        let console = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/tty0")?;
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(program);
        command
            .stdin(console.try_clone()?)
            .stdout(console.try_clone()?)
            .stderr(console);
        command
    } else {
        let open = |name| {
            OpenOptions::new()
                .append(true)
                .open(Path::new(OUT).join(name))
        };
        let mut command = Command::new(program);
        command
            .stdin(Stdio::null())
            .stdout(open("stdout")?)
            .stderr(open("stderr")?)
            .process_group(0);
        command
    };
    command.args(words).env_clear();
    let environment = fs::read(Path::new(OUT).join("env"))?;
    for variable in zero_terminated(&environment) {
        let (name, value) = split_once(variable.as_bytes());
        let mut value = OsStr::from_bytes(value).to_owned();
        if read_only() && name == b"PATH" {
            value = [PROGRAMS.as_ref(), value.as_os_str()].join(OsStr::new(":"));
        }
        command.env(OsStr::from_bytes(name), value);
    }
    if read_only() {
        command.env("TMPDIR", TEMPORARY);
    }
    let cwd = fs::read(Path::new(OUT).join("cwd"))?;
    let cwd = Path::new(OsStr::from_bytes(&cwd));
    // The host's directory may be hidden from the user who started the guest.
    command.current_dir(if cwd.is_dir() { cwd } else { Path::new("/") });
    Ok(command)
}

fn zero_terminated(bytes: &[u8]) -> impl Iterator<Item = &OsStr> {
    bytes
        .strip_suffix(&[0])
        .unwrap_or(bytes)
        .split(|byte| *byte == 0)
        .map(OsStr::from_bytes)
}

fn split_once(variable: &[u8]) -> (&[u8], &[u8]) {
    let mut parts = variable.splitn(2, |byte| *byte == b'=');
    (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    )
}

/// Writes what a person wants to see of a hung command: where its threads wait and what each of its network namespaces holds.
fn describe(seconds: u64) -> Result<()> {
    let mut text = OpenOptions::new()
        .create(true)
        .append(true)
        .open(Path::new(OUT).join("hung"))?;
    writeln!(
        text,
        "guest: the command did not end within {seconds} s; its threads and network namespaces:"
    )?;
    let mut seen = BTreeSet::new();
    for process in numbered(Path::new("/proc")) {
        let arguments = fs::read(process.join("cmdline")).unwrap_or_default();
        if arguments.is_empty() || process.ends_with("1") {
            continue; // a kernel thread, or ourselves
        }
        writeln!(
            text,
            "{} {}",
            process.display(),
            String::from_utf8_lossy(&arguments).replace('\0', " ")
        )?;
        for thread in numbered(&process.join("task")) {
            let read = |name| fs::read_to_string(thread.join(name)).unwrap_or_default();
            writeln!(
                text,
                "  {} {}in {} {}",
                thread.display(),
                read("comm").replace('\n', " "),
                read("wchan"),
                read("syscall").trim()
            )?;
            text.write_all(read("stack").as_bytes())?;
            let namespace = thread.join("ns/net");
            if let (Ok(name), Ok(file)) = (fs::read_link(&namespace), File::open(&namespace))
                && seen.insert(name.clone())
            {
                writeln!(text, "--- {}", name.display())?;
                describe_namespace(&file, &text)?;
            }
        }
    }
    Ok(())
}

fn numbered(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbered =
        entries.filter(|entry| entry.file_name().as_bytes().iter().all(u8::is_ascii_digit));
    numbered.map(|entry| entry.path()).collect()
}

fn describe_namespace(namespace: &File, text: &File) -> Result<()> {
    const TOOLS: [&[&str]; 5] = [
        &["ip", "-brief", "address"],
        &["ipvsadm", "-Ln"],
        &["ipset", "save"],
        &["iptables-save"],
        &["ip6tables-save"],
    ];
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    for tool in TOOLS {
        let Some((program, arguments)) = tool.split_first() else {
            continue;
        };
        writeln!(&*text, "$ {}", tool.join(" "))?;
        let status = Command::new(program)
            .args(arguments)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(text.try_clone()?)
            .stderr(text.try_clone()?)
            .status();
        if let Err(error) = status {
            writeln!(&*text, "{error}")?;
        }
    }
    Ok(())
}
