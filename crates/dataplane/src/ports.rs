//! Node ports that the kernel may give to connections of the node's own.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;

const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// Where kube-apiserver takes node ports from if nobody says otherwise (`--service-node-port-range`).
pub const NODE_PORTS: RangeInclusive<u16> = 30000..=32767;

/// What is to be said of these node ports, if the kernel may give some of them to connections of the
/// node's own, which then get no answers: these are taken for requests to the Service. It is the same as
/// long as neither the sysctls nor the number of such ports changes.
///
/// # Errors
/// If the sysctls of the thread's network namespace can't be read.
pub fn given_away(node_ports: &BTreeSet<u16>) -> io::Result<Option<String>> {
    let (range, reserved) = (fs::read_to_string(RANGE)?, fs::read_to_string(RESERVED)?);
    Ok(finding(range.trim(), reserved.trim(), node_ports))
}

fn finding(range: &str, reserved: &str, node_ports: &BTreeSet<u16>) -> Option<String> {
    let mut ends = range.split_whitespace().map(str::parse);
    let (Some(Ok(low)), Some(Ok(high))) = (ends.next(), ends.next()) else {
        return None;
    };
    let kept = |port: &u16| ranges(reserved).any(|range| range.contains(port));
    let mut given: BTreeSet<u16> = node_ports.iter().copied().collect();
    given.retain(|port| (low..=high).contains(port) && !kept(port));
    let (first, last) = (given.first()?, given.last()?);
    // All of kube-apiserver's where they are of these.
    let (first, last) = match NODE_PORTS.contains(first) && NODE_PORTS.contains(last) {
        true => (NODE_PORTS.start(), NODE_PORTS.end()),
        false => (first, last),
    };
    let more = match reserved {
        "" => String::new(),
        reserved => format!("{reserved},"),
    };
    Some(format!(
        "sysctl net.ipv4.ip_local_port_range is {low} {high}: connections of the node may take the ports of \
         {} node ports and go without answers: reserve these with sysctl -w \
         net.ipv4.ip_local_reserved_ports={more}{first}-{last}, or set another range",
        given.len()
    ))
}

/// The ranges of `ip_local_reserved_ports`: `8080,30000-32767`.
fn ranges(reserved: &str) -> impl Iterator<Item = RangeInclusive<u16>> {
    reserved.split(',').filter_map(|range| {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        Some(low.trim().parse().ok()?..=high.trim().parse().ok()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_in_the_range_and_not_reserved_is_given_away() {
        let some: BTreeSet<u16> = [30080, 30443].into();
        for (range, reserved) in [
            ("32768\t60999", ""),
            ("1024\t65535", "30000-32767"),
            ("1024\t65535", "8080,30080,30400-30500"),
            ("30444 60999", "30443"),
            ("nonsense", ""),
        ] {
            assert_eq!(finding(range, reserved, &some), None, "{range} {reserved}");
        }
        assert_eq!(finding("1024 65535", "", &BTreeSet::new()), None);
        for (range, reserved, ports, number, reserve) in [
            ("1024\t65535", "", [30080, 30443], 2, "=30000-32767,"),
            (
                "1024\t65535",
                "30443",
                [30080, 30443],
                1,
                "=30443,30000-32767,",
            ),
            ("32768\t60999", "", [30080, 40000], 1, "=40000-40000,"),
        ] {
            let said = finding(range, reserved, &ports.into()).unwrap();
            assert!(said.contains(&format!("of {number} node ports")), "{said}");
            assert!(said.contains(reserve), "{said}");
        }
    }
}
