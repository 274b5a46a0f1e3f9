//! The order in which `ipvsadm` lists: `ipvs_cmp_services` and `ipvs_cmp_dests` of its
//! libipvs.c, which take the sign of a wrapped 32-bit difference for the order of two numbers.
//! That order is no order (1 < 2^31 < 1), so what comes out depends on how it is sorted; and
//! Rust's sort may panic on it.

use std::cmp::Ordering;
use std::net::IpAddr;

use ipvs_netlink::{RealServerKey, VirtualServerKey};

/// Sorts as glibc's `qsort` does: a merge sort that halves from the top, the first half being
/// the shorter one, and prefers the first half among equals.
pub(super) fn merge_sort<T>(mut first: Vec<T>, compare: fn(&T, &T) -> Ordering) -> Vec<T> {
    if first.len() < 2 {
        return first;
    }
    let mut sorted = Vec::with_capacity(first.len());
    let second = merge_sort(first.split_off(first.len() / 2), compare);
    let mut first = merge_sort(first, compare).into_iter().peekable();
    let mut second = second.into_iter().peekable();
    while let (Some(a), Some(b)) = (first.peek(), second.peek()) {
        let next = if compare(a, b).is_gt() {
            second.next()
        } else {
            first.next()
        };
        sorted.extend(next);
    }
    sorted.extend(first);
    sorted.extend(second);
    sorted
}

pub(super) fn virtual_servers(a: &VirtualServerKey, b: &VirtualServerKey) -> Ordering {
    let (a_mark, a_protocol, a_address, a_port) = parts(a);
    let (b_mark, b_protocol, b_address, b_port) = parts(b);
    wrapped(a_mark, b_mark)
        .then(a.family().number().cmp(&b.family().number()))
        .then(a_protocol.cmp(&b_protocol))
        .then_with(|| words(a_address, b_address, true))
        .then(a_port.cmp(&b_port))
}

pub(super) fn real_servers(a: &RealServerKey, b: &RealServerKey) -> Ordering {
    // With two families (tunnels only) the first one's decides how much of both is compared.
    words(a.address, b.address, a.address.is_ipv6()).then(a.port.cmp(&b.port))
}

fn parts(key: &VirtualServerKey) -> (u32, u8, IpAddr, u16) {
    match *key {
        VirtualServerKey::Address {
            address,
            port,
            protocol,
        } => (0, protocol.number(), address, port),
        VirtualServerKey::FirewallMark { mark, .. } => {
            (mark, 0, IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0)
        }
    }
}

fn words(a: IpAddr, b: IpAddr, all: bool) -> Ordering {
    let words = |address| match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
        IpAddr::V6(address) => address.to_bits(),
    };
    let (a, b) = (words(a), words(b));
    let shifts = [96, 64, 32, 0].into_iter().take(if all { 4 } else { 1 });
    let word = |bits: u128, shift: u32| u32::try_from(bits >> shift & 0xffff_ffff).unwrap_or(0);
    shifts.fold(Ordering::Equal, |order, shift| {
        order.then_with(|| wrapped(word(a, shift), word(b, shift)))
    })
}

fn wrapped(a: u32, b: u32) -> Ordering {
    a.wrapping_sub(b).cast_signed().cmp(&0)
}
