//! Runs a program that may hang, write without end, or leave others behind.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use crate::Error;

/// Where programs are when `PATH` does not say so.
const SYSTEM_FOLDERS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// The most that a program may print: some 500,000 rules.
const MOST_OUTPUT: usize = 64 * 1024 * 1024;
/// Of its complaints the first of them are enough.
const MOST_COMPLAINTS: usize = 64 * 1024;

/// How long a wish to stop, or the end of a program that left its pipes to another, goes unnoticed.
const TICK_MS: u16 = 50;
/// How long the kernel may need to end a killed program. One that it can't end is left to it.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// Ends the programs of those who share it, and lets none begin.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends them within some milliseconds, from now on.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The file of a program: in `PATH`, `/usr/sbin` or `/sbin`.
pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Runs a program with `input` on its standard input, and waits for its end. It has a process group of
/// its own, and all of that is killed at the end: when the time is over, when it printed too much,
/// when it shall [`Stop`], and when it ended but others of its group did not.
///
/// # Errors
///
/// [`Error::Missing`], [`Error::Run`], [`Error::TooLong`], [`Error::TooMuch`], [`Error::Stopped`]. A
/// program that ran and failed is no error: see the status.
pub fn run(
    program: &str,
    arguments: &[&str],
    input: Option<&str>,
    time: Duration,
    stop: &Stop,
) -> Result<Output, Error> {
    let name = || program.to_owned();
    let file = which(program).ok_or_else(|| Error::Missing { program: name() })?;
    let failed = |cause: io::Error| Error::Run {
        program: name(),
        cause,
    };
    let end = Instant::now() + time;
    let left = || {
        if stop.is_set() {
            return Err(Error::Stopped { program: name() });
        }
        match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(Error::TooLong {
                program: name(),
                time,
            }),
            left => Ok(left),
        }
    };
    left()?;
    let child = Command::new(file)
        .args(arguments)
        .env("LC_ALL", "C")
        .process_group(0)
        .stdin(match input {
            Some(_) => Stdio::piped(),
            None => Stdio::null(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut group = Group(child);
    let mut stdin = Writer::new(group.0.stdin.take(), input.unwrap_or_default()).map_err(failed)?;
    let mut stdout = Reader::new(group.0.stdout.take()).map_err(failed)?;
    let mut stderr = Reader::new(group.0.stderr.take()).map_err(failed)?;
    loop {
        let most = PollTimeout::try_from(left()?).unwrap_or(PollTimeout::MAX);
        let fds = [stdin.fd(), stdout.fd(), stderr.fd()].into_iter().flatten();
        let mut fds: Vec<PollFd<'_>> = fds.collect();
        if fds.is_empty() {
            break;
        }
        match poll(&mut fds, most.min(PollTimeout::from(TICK_MS))) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        // Before what it wrote is read: nothing comes after.
        let ended = group.ended();
        stdin.write();
        let read = [stdout.read(), stderr.read()];
        if stdout.bytes.len() > MOST_OUTPUT {
            return Err(Error::TooMuch {
                program: name(),
                bytes: MOST_OUTPUT,
            });
        }
        stderr.bytes.truncate(MOST_COMPLAINTS);
        // Others may hold its pipes open.
        if ended && read == [false, false] {
            break;
        }
    }
    let mut pause = Duration::from_micros(100);
    while !group.ended() {
        thread::sleep(pause.min(left()?));
        pause = (pause * 2).min(Duration::from_millis(TICK_MS.into()));
    }
    group.kill();
    let status = group.0.wait().map_err(failed)?;
    match stdin.failure {
        // A tool that stops at a bad line closes its input early, and says why itself.
        Some(error) if status.success() => Err(failed(error)),
        _ => Ok(Output {
            status,
            stdout: stdout.bytes,
            stderr: stderr.bytes,
        }),
    }
}

/// A child that leads a process group.
struct Group(Child);

impl Group {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }

    /// Whether the child has ended; it stays to be waited for, so that its number is not given anew.
    fn ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        !matches!(
            waitid(Id::Pid(self.pid()), flags),
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR)
        )
    }

    /// Only before the child is waited for.
    fn kill(&self) {
        // There may be nobody left.
        let _ = killpg(self.pid(), Signal::SIGKILL);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // It was waited for.
        if let Ok(Some(_)) = self.0.try_wait() {
            return;
        }
        self.kill();
        let end = Instant::now() + LAST_WAIT;
        while let Ok(None) = self.0.try_wait()
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd.as_fd(), FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

fn file(pipe: Option<impl Into<OwnedFd>>) -> io::Result<Option<File>> {
    let pipe = pipe.map(|pipe| File::from(pipe.into()));
    pipe.iter().try_for_each(nonblocking)?;
    Ok(pipe)
}

struct Writer<'a> {
    pipe: Option<File>,
    rest: &'a [u8],
    failure: Option<io::Error>,
}

impl<'a> Writer<'a> {
    fn new(pipe: Option<impl Into<OwnedFd>>, text: &'a str) -> io::Result<Writer<'a>> {
        Ok(Writer {
            pipe: file(pipe)?,
            rest: text.as_bytes(),
            failure: None,
        })
    }

    fn fd(&self) -> Option<PollFd<'_>> {
        let fd: BorrowedFd<'_> = self.pipe.as_ref()?.as_fd();
        Some(PollFd::new(fd, PollFlags::POLLOUT))
    }

    fn write(&mut self) {
        while let Some(pipe) = &mut self.pipe {
            match pipe.write(self.rest) {
                Ok(written) => {
                    self.rest = self.rest.get(written..).unwrap_or_default();
                    if !self.rest.is_empty() {
                        continue;
                    }
                }
                Err(error) if waits(&error) => return,
                Err(error) => self.failure = Some(error),
            }
            self.pipe = None;
        }
    }
}

struct Reader {
    pipe: Option<File>,
    bytes: Vec<u8>,
}

impl Reader {
    fn new(pipe: Option<impl Into<OwnedFd>>) -> io::Result<Reader> {
        Ok(Reader {
            pipe: file(pipe)?,
            bytes: Vec::new(),
        })
    }

    fn fd(&self) -> Option<PollFd<'_>> {
        let fd: BorrowedFd<'_> = self.pipe.as_ref()?.as_fd();
        Some(PollFd::new(fd, PollFlags::POLLIN))
    }

    /// Reads once; whether there was something.
    fn read(&mut self) -> bool {
        let Some(pipe) = &mut self.pipe else {
            return false;
        };
        let mut buffer = [0; 16 * 1024];
        match pipe.read(&mut buffer) {
            Ok(length @ 1..) => {
                let read = buffer.get(..length).unwrap_or_default();
                self.bytes.extend_from_slice(read);
                true
            }
            Err(error) if waits(&error) => false,
            Ok(0) | Err(_) => {
                self.pipe = None;
                false
            }
        }
    }
}

fn waits(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(300);

    /// A shell script that is run as a tool is.
    fn script(text: &str, input: Option<&str>, time: Duration) -> Result<Output, Error> {
        run("sh", &["-c", text], input, time, &Stop::default())
    }

    fn stdout(output: &Output) -> &str {
        str::from_utf8(&output.stdout).unwrap()
    }

    /// How many of a process group live; those whom nobody waited for do not.
    fn living(group: &str) -> usize {
        let processes = std::fs::read_dir("/proc").unwrap();
        let of_group = |text: &String| {
            let (_, rest) = text.rsplit_once(") ").unwrap();
            let words: Vec<&str> = rest.split(' ').collect();
            words[2] == group && words[0] != "Z"
        };
        let stats = processes
            .filter_map(|process| std::fs::read_to_string(process.ok()?.path().join("stat")).ok());
        stats.filter(of_group).count()
    }

    /// How long it took, at most a fraction of what it would take to hang.
    fn soon<T>(what: &str, run: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = run();
        let took = start.elapsed();
        assert!(took < LONG / 4, "{what}: {took:?}");
        result
    }

    #[test]
    fn input_and_output_pass_whatever_their_size() {
        let text = "0123456789abcde\n".repeat(100_000);
        let output = script("cat; echo said >&2; exit 3", Some(&text), LONG).unwrap();
        assert_eq!(stdout(&output), text);
        assert_eq!(output.stderr, b"said\n");
        assert_eq!(output.status.code(), Some(3));
        let output = script("cat; echo $LC_ALL", None, LONG).unwrap();
        assert_eq!(stdout(&output), "C\n");
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_all_that_it_began() {
        let folder = std::env::temp_dir().join(format!("program-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pids = folder.join("pids");
        let big = "x".repeat(1_000_000);
        for hangs in [
            "sleep 1000",
            "exec >&- 2>&- <&-; sleep 1000",
            "trap '' TERM INT HUP; while :; do sleep 1; done",
            // It takes no input, of which there is more than a pipe holds.
            "sleep 1000 & sleep 1000",
        ] {
            let text = format!("echo $$ > {}; {hangs}", pids.display());
            let result = soon(hangs, || script(&text, Some(&big), SHORT));
            let error = result.unwrap_err().to_string();
            assert_eq!(
                error, "sh did not end within 300ms and was killed",
                "{hangs}"
            );
            let group = std::fs::read_to_string(&pids).unwrap();
            // The children of the killed shell end when the kernel gets to it.
            soon(hangs, || {
                while living(group.trim()) > 0 {
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn who_keeps_the_pipes_of_an_ended_program_is_not_waited_for() {
        // In its group, and in one of its own.
        for left in ["sleep 1000 &", "setsid sleep 15 &"] {
            let text = format!("{left} echo done");
            let output = soon(left, || script(&text, None, LONG)).unwrap();
            assert_eq!(stdout(&output), "done\n", "{left}");
            let killed = format!("{left} exec sleep 1000");
            let result = soon(left, || script(&killed, None, SHORT));
            assert!(matches!(result, Err(Error::TooLong { .. })), "{left}");
        }
    }

    #[test]
    fn a_program_that_writes_without_end_is_killed() {
        let result = soon("yes", || script("yes", None, LONG));
        let error = result.unwrap_err().to_string();
        assert_eq!(error, "sh printed more than 67108864 bytes and was killed");
        let result = soon("yes >&2", || script("yes >&2", None, SHORT * 3));
        assert!(matches!(result, Err(Error::TooLong { .. })));
    }

    #[test]
    fn a_program_ends_when_it_shall_and_none_begins_then() {
        let stop = Stop::default();
        let stopped = |result| matches!(result, Err(Error::Stopped { .. }));
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(SHORT);
                stop.stop();
            });
            assert!(stopped(soon("sleep", || run(
                "sleep",
                &["1000"],
                None,
                LONG,
                &stop
            ))));
        });
        assert!(stopped(run("true", &[], None, LONG, &stop)));
    }

    #[test]
    fn input_that_is_not_taken_is_a_failure_of_a_program_that_says_it_did() {
        let big = "x".repeat(1_000_000);
        let error = script("exit 0", Some(&big), LONG).unwrap_err().to_string();
        assert!(
            error.contains("could not be run: ") && error.contains("EPIPE")
                || error.contains("Broken pipe"),
            "{error}"
        );
        let output = script("echo why >&2; exit 1", Some(&big), LONG).unwrap();
        assert_eq!(output.stderr, b"why\n");
    }

    #[test]
    fn what_cannot_be_started_says_why() {
        let error = run("/dev/null/x", &[], None, LONG, &Stop::default()).unwrap_err();
        assert!(error.to_string().contains("is not in PATH"), "{error}");
        let error = run("/etc/hostname", &[], None, LONG, &Stop::default()).unwrap_err();
        // Of what kind depends on who runs this.
        assert!(error.to_string().contains(" (os error "), "{error}");
    }
}
