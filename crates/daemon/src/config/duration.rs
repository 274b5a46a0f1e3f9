//! Times as Go writes them, which is how Kubernetes has them in flags, files and annotations.

use std::time::Duration;

use ipvs_proxy_core::model::DrainTimeout;

/// Nanoseconds in each unit; `ms` before `m`, which it begins with.
const UNITS: [(&str, u128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// The longest time that Go holds: 2^63 - 1 ns, 292 years.
const LONGEST_NS: u128 = i64::MAX as u128;

/// Reads a time as Go does (`time.ParseDuration`): `1h30m`, `30s`, `1.5s`, `250ms`, and `0` without
/// a unit. `None` for what is no such time, and for one below zero.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = 0_u128;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let unit = UNITS.iter().find(|(unit, _)| tail.starts_with(unit))?;
        total = total.checked_add(nanoseconds(number, unit.1)?)?;
        rest = tail.get(unit.0.len()..)?;
    }
    let total = u64::try_from(total).ok().filter(|_| total <= LONGEST_NS)?;
    (!text.is_empty()).then(|| Duration::from_nanos(total))
}

/// Reads how long real servers may drain: a time, `0` for no limit, `now` for not at all.
#[must_use]
pub fn parse_drain_timeout(text: &str) -> Option<DrainTimeout> {
    if text == "now" {
        return Some(DrainTimeout::Now);
    }
    let time = parse_duration(text)?;
    Some(match time.is_zero() {
        true => DrainTimeout::Unlimited,
        false => DrainTimeout::After(time),
    })
}

/// Writes it as it is read.
#[must_use]
pub fn format_drain_timeout(timeout: DrainTimeout) -> String {
    match timeout {
        DrainTimeout::Unlimited => format_duration(Duration::ZERO),
        DrainTimeout::After(time) => format_duration(time),
        DrainTimeout::Now => "now".to_owned(),
    }
}

fn nanoseconds(number: &str, unit: u128) -> Option<u128> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    let mut total = match whole {
        "" => 0,
        whole => whole.parse::<u128>().ok()?.checked_mul(unit)?,
    };
    let mut worth = unit;
    for digit in part.chars() {
        worth /= 10;
        total = total.checked_add(u128::from(digit.to_digit(10)?) * worth)?;
    }
    Some(total)
}

/// Writes a time as Go does (`Duration.String`): `1h0m0s`, `1.5s`, `250ms`, `0s`.
#[must_use]
pub fn format_duration(time: Duration) -> String {
    let ns = time.as_nanos();
    let (seconds, part) = (time.as_secs(), time.subsec_nanos());
    let decimal = |whole: u128, part: u128, width: usize| {
        let text = format!("{whole}.{part:0width$}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match ns {
        0 => "0s".to_owned(),
        1..1_000 => format!("{ns}ns"),
        1_000..1_000_000 => decimal(ns / 1_000, ns % 1_000, 3) + "\u{b5}s",
        1_000_000..1_000_000_000 => decimal(ns / 1_000_000, ns % 1_000_000, 6) + "ms",
        _ => {
            let last = decimal((seconds % 60).into(), part.into(), 9);
            match (seconds / 3600, seconds / 60 % 60) {
                (0, 0) => format!("{last}s"),
                (0, minutes) => format!("{minutes}m{last}s"),
                (hours, minutes) => format!("{hours}h{minutes}m{last}s"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn how_long_a_drain_may_last() {
        use DrainTimeout::{After, Now, Unlimited};
        for (text, timeout, written) in [
            ("0", Unlimited, "0s"),
            ("0s", Unlimited, "0s"),
            ("90s", After(Duration::from_secs(90)), "1m30s"),
            ("now", Now, "now"),
        ] {
            assert_eq!(parse_drain_timeout(text), Some(timeout), "{text}");
            assert_eq!(format_drain_timeout(timeout), written);
        }
        for text in ["", "none", "Now", "-1s", "1"] {
            assert_eq!(parse_drain_timeout(text), None, "{text:?}");
        }
    }

    #[test]
    fn as_go_reads_and_writes_them() {
        for (text, ns, written) in [
            ("0", 0, "0s"),
            ("0s", 0, "0s"),
            ("30s", 30_000_000_000, "30s"),
            ("1h", 3_600_000_000_000, "1h0m0s"),
            ("24h0m0s", 86_400_000_000_000, "24h0m0s"),
            ("1m30s", 90_000_000_000, "1m30s"),
            ("1.5s", 1_500_000_000, "1.5s"),
            (".5m", 30_000_000_000, "30s"),
            ("+250ms", 250_000_000, "250ms"),
            ("1.1us", 1_100, "1.1\u{b5}s"),
            ("1\u{3bc}s3ns", 1_003, "1.003\u{b5}s"),
            ("7ns", 7, "7ns"),
        ] {
            let time = Duration::from_nanos(ns);
            assert_eq!(parse_duration(text), Some(time), "{text}");
            assert_eq!(format_duration(time), written);
        }
        for text in [
            "",
            "+",
            "30",
            "s",
            ".s",
            "-1s",
            "1x",
            "1s ",
            "1.2.3s",
            "1e3s",
            "300000000h",
            "1hs",
        ] {
            assert_eq!(parse_duration(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(ns in 0..=i64::MAX as u64) {
            let time = Duration::from_nanos(ns);
            prop_assert_eq!(parse_duration(&format_duration(time)), Some(time));
        }
    }
}
