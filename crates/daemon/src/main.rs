//! The process: reads the command line, runs the subcommand, gives the exit code.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use ipvs_proxy::cli::{self, Cleanup, Cli, Command, LogFormat, Plan, Run};
use ipvs_proxy::{cleanup, config, init, inspect, plan, run, say};
use ipvs_proxy_netlink::Causes;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// A command line that can't be used.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    if std::path::Path::new(&name)
        .file_name()
        .is_some_and(|name| name == "ipvsadm")
    {
        let arguments: Vec<String> = arguments
            .map(|a| a.to_string_lossy().into_owned())
            .collect();
        return inspect::run(&arguments);
    }
    let words = cli::with_subcommand(cli::with_hyphens(std::env::args_os()));
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(error) if error.exit_code() == 0 => {
            // Help and version; nobody may be listening.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            say(format_args!("ipvs-proxy: {}", cli::one_line(&error)));
            return ExitCode::from(USAGE);
        }
    };
    match cli.command {
        Command::Run(flags) => run_command(&flags),
        Command::Plan(flags) => plan_command(&flags),
        Command::Cleanup(flags) => cleanup_command(&flags),
        Command::Ipvsadm { arguments } => inspect::run(&arguments),
    }
}

fn run_command(flags: &Run) -> ExitCode {
    let loaded = match config::load(flags) {
        Ok(loaded) => loaded,
        Err(problems) => {
            for problem in problems {
                say(format_args!("ipvs-proxy: {problem}"));
            }
            return ExitCode::from(USAGE);
        }
    };
    let settings = &loaded.settings;
    if flags.cleanup == Some(true) && flags.write_config_to.is_none() {
        return cleanup_command(&Cleanup {
            iptables_backend: settings.iptables_backend,
            ipvs_exclude_cidrs: settings.config.exclude_cidrs.clone(),
        });
    }
    let level = LevelFilter::from_level(settings.log_level());
    // What libraries have to say of an API server that is away is said here once, and not with whole answers.
    let others = match level >= LevelFilter::DEBUG {
        true => level,
        false => LevelFilter::OFF,
    };
    let filter = Targets::new()
        .with_default(others)
        .with_target("ipvs_proxy", level);
    let log = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // Else a line that can't be written makes another that panics.
        .log_internal_errors(false)
        .with_target(false);
    let registry = tracing_subscriber::registry().with(filter);
    match settings.log_format {
        LogFormat::Text => registry.with(log.with_ansi(false)).init(),
        LogFormat::Json => registry.with(log.json().flatten_event(true)).init(),
    }
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let ended = match &flags.write_config_to {
        Some(path) => loaded.write(path),
        None if flags.init_only == Some(true) => init::init(settings),
        None => run::run(&loaded, flags),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", Causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn cleanup_command(flags: &Cleanup) -> ExitCode {
    match cleanup::cleanup(flags) {
        Ok(0) => {
            say("ipvs-proxy: nothing of ours is in the kernel");
            ExitCode::SUCCESS
        }
        Ok(removed) => {
            say(format_args!("ipvs-proxy: removed {removed} things"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(format_args!("ipvs-proxy: {}", Causes(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn plan_command(flags: &Plan) -> ExitCode {
    match plan::plan(flags) {
        Ok(planned) => {
            for problem in planned.problems {
                say(problem);
            }
            let printed = std::io::stdout().lock().write_all(planned.text.as_bytes());
            if planned.whole && !planned.differs && printed.is_ok() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            for line in error.lines() {
                say(format_args!("ipvs-proxy: {line}"));
            }
            ExitCode::from(USAGE)
        }
    }
}
