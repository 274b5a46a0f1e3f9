//! Sends messages and sorts the answers.

use std::collections::BTreeMap;
use std::ops::Range;

use ipvs_proxy_netlink::{Error as NetlinkError, Family, KernelError, Request, Socket, Subsystem};

use crate::codec::Member;
use crate::{Change, Entry, Error, Options, Set, SetName, SetSpec, SetType, codec};

/// Entries in one message: at most 35 KiB, of the 64 KiB that an attribute can hold.
const MAX_ENTRIES: usize = 250;

const EINVAL: i32 = 22; // <asm-generic/errno-base.h>
const EPROTONOSUPPORT: i32 = 93; // <asm-generic/errno.h>

/// Lists and changes the sets of the network namespace in which it was opened. Needs
/// `CAP_NET_ADMIN`, for listing too.
#[derive(Debug)]
pub struct Client {
    socket: Socket,
    /// The lowest and highest revision of each type that the kernel was asked for.
    revisions: BTreeMap<SetType, (u8, u8)>,
}

impl Client {
    /// Opens a socket and asks the kernel whether it has ipset; it loads the module if it can.
    ///
    /// # Errors
    ///
    /// [`Error::NoModule`] when it has not, [`Error::Permission`], [`Error::Transport`].
    pub fn open() -> Result<Client, Error> {
        let no_module = Error::NoModule {
            what: "ipset",
            module: "ip_set",
        };
        let mut socket = match Socket::open(Subsystem::Netfilter) {
            Ok(socket) => socket,
            // The kernel lacks nfnetlink, which comes along with ipset.
            Err(NetlinkError::Socket {
                errno: EPROTONOSUPPORT,
                ..
            }) => return Err(no_module),
            Err(error) => return Err(error.into()),
        };
        match socket.query(&codec::protocol()?) {
            Ok(_) => Ok(Client {
                socket,
                revisions: BTreeMap::new(),
            }),
            // nfnetlink's answer for a subsystem that it does not have.
            Err(NetlinkError::Kernel(KernelError { code: EINVAL, .. })) => Err(no_module),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the changes in order; one result for each, in the same order. A change that fails
    /// stops no other.
    ///
    /// Consecutive additions to one set, and consecutive removals from one, share messages of up
    /// to 250 entries. Where the kernel refuses one of them, it and all later changes of that set
    /// are made again one by one, so the end is that of the order given; what was done in the
    /// first pass shows for a moment.
    ///
    /// [`Error::Overrun`] as a result means that the change may be done or not.
    pub fn change(&mut self, changes: &[Change]) -> Vec<Result<(), Error>> {
        let is_swap = |change: &Change| matches!(change, Change::Swap(..));
        changes
            // What is made again must stay on its side of a swap.
            .chunk_by(|a, b| !is_swap(a) && !is_swap(b))
            .flat_map(|run| self.change_and_check(run))
            .collect()
    }

    fn change_and_check(&mut self, changes: &[Change]) -> Vec<Result<(), Error>> {
        let mut results = self.change_in_order(changes);
        for (change, result) in changes.iter().zip(&mut results) {
            if let Change::Create(spec) = change
                && result.is_ok()
            {
                *result = self.check_family(spec);
            }
        }
        results
    }

    fn change_in_order(&mut self, changes: &[Change]) -> Vec<Result<(), Error>> {
        let mut results = vec![Ok(()); changes.len()];
        let mut refused = BTreeMap::<SetName, usize>::new();
        let parts = packed(changes);
        for (part, result) in parts.iter().zip(self.send(changes, &parts)) {
            if let (Err(error), Some(first)) = (&result, changes.get(part.start))
                && part.len() > 1
                && !error.concerns_all_entries()
            {
                refused.entry(first.set()).or_insert(part.start);
            }
            for slot in results.iter_mut().take(part.end).skip(part.start) {
                slot.clone_from(&result);
            }
        }
        if refused.is_empty() {
            return results;
        }
        let again: Vec<Range<usize>> = changes
            .iter()
            .enumerate()
            .filter(|(i, change)| refused.get(&change.set()).is_some_and(|first| first <= i))
            .map(|(i, _)| i..i + 1)
            .collect();
        for (part, result) in again.iter().zip(self.send(changes, &again)) {
            if let Some(slot) = results.get_mut(part.start) {
                *slot = result;
            }
        }
        results
    }

    /// Creating a set that exists succeeds although that one has the other family, if all else is
    /// equal (Linux 6.18; 6.1 too, but for `hash:ip`).
    fn check_family(&mut self, spec: &SetSpec) -> Result<(), Error> {
        match self
            .socket
            .query(&codec::header(&spec.name)?)
            .map_err(Error::from)
        {
            Ok(answers) => match codec::decode_list(&answers)?.first() {
                Some((set, _)) if set.kind == Some(spec.kind) => Ok(()),
                _ => Err(Error::Exists),
            },
            // A later change destroyed it.
            Err(Error::NoSet) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Lists all sets without their entries.
    ///
    /// # Errors
    ///
    /// [`Error::Overrun`] when a part was lost, else as the kernel says.
    pub fn list_headers(&mut self) -> Result<Vec<Set>, Error> {
        let sets = self.list_sets(None, false)?;
        Ok(sets.into_iter().map(|(set, _)| set).collect())
    }

    /// Lists one set with its entries, in the kernel's order. Of a set whose [`Set::kind`] is not
    /// known there are none. A listing of a set that changes meanwhile may miss entries.
    ///
    /// # Errors
    ///
    /// [`Error::NoSet`] when there is none, [`Error::Overrun`] when a part was lost.
    pub fn list(&mut self, name: &SetName) -> Result<(Set, Vec<Entry>), Error> {
        self.list_with_options(name).map(plain)
    }

    /// As [`Client::list`], with the options of each entry.
    ///
    /// # Errors
    ///
    /// As [`Client::list`].
    pub fn list_with_options(
        &mut self,
        name: &SetName,
    ) -> Result<(Set, Vec<(Entry, Options)>), Error> {
        self.list_sets(Some(name), true)?.pop().ok_or(Error::NoSet)
    }

    /// Lists all sets with their entries, as [`Client::list`] does one.
    ///
    /// # Errors
    ///
    /// As [`Client::list_headers`].
    pub fn list_all(&mut self) -> Result<Vec<(Set, Vec<Entry>)>, Error> {
        Ok(self.list_sets(None, true)?.into_iter().map(plain).collect())
    }

    /// Whether a set has an entry; of an exception (`nomatch`) it says no. A set with networks has
    /// every address in one of them.
    ///
    /// # Errors
    ///
    /// [`Error::NoSet`] when there is no such set, else as the kernel says.
    pub fn contains(&mut self, name: &SetName, entry: &Entry) -> Result<bool, Error> {
        check_prefix(entry)?;
        match self.socket.query(&codec::test(name, entry)?) {
            Ok(_) => Ok(true),
            Err(NetlinkError::Kernel(refusal)) if refusal.code == codec::IPSET_ERR_EXIST => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn list_sets(
        &mut self,
        name: Option<&SetName>,
        with_entries: bool,
    ) -> Result<Vec<(Set, Vec<Member>)>, Error> {
        let answers = self.socket.dump(&codec::list(name, with_entries)?)?;
        Ok(codec::decode_list(&answers)?)
    }

    /// Sends each part as one message; one result for each.
    fn send(&mut self, changes: &[Change], parts: &[Range<usize>]) -> Vec<Result<(), Error>> {
        let parts: Vec<&[Change]> = parts
            .iter()
            .filter_map(|part| changes.get(part.clone()))
            .collect();
        let mut requests = Vec::new();
        let encoded: Vec<Result<(), Error>> = parts
            .iter()
            .map(|part| self.request(part).map(|request| requests.push(request)))
            .collect();
        let mut answers = self.socket.batch(&requests).into_iter();
        encoded
            .into_iter()
            .zip(parts)
            .map(|(encoded, part)| {
                encoded?;
                let answer = answers.next().unwrap_or(Err(NetlinkError::Overrun));
                match (answer, part.first()) {
                    (Err(error), Some(change)) => match (change, Error::of(error, change)) {
                        // Kernels before 5.11 refuse this.
                        (Change::Destroy(_), Error::NoSet) => Ok(()),
                        (_, error) => Err(error),
                    },
                    (answer, _) => Ok(answer?),
                }
            })
            .collect()
    }

    /// The message for one part: a single change, or entries to add to or remove from one set.
    fn request(&mut self, part: &[Change]) -> Result<Request, Error> {
        part.iter().try_for_each(check)?;
        let entries = part.iter().filter_map(|change| match change {
            Change::Add(_, entry) | Change::Remove(_, entry) => Some((entry, Options::default())),
            Change::AddWith(_, entry, options) => Some((entry, *options)),
            _ => None,
        });
        let request = match part.first() {
            Some(Change::Create(spec)) => codec::create(spec, self.revision(spec)?),
            Some(Change::Destroy(name)) => codec::destroy(name),
            Some(Change::Flush(name)) => codec::flush(name),
            Some(Change::Swap(name, other)) => codec::swap(name, other),
            Some(Change::Add(name, _) | Change::AddWith(name, ..)) => codec::add(name, entries),
            Some(Change::Remove(name, _)) => codec::remove(name, entries.map(|(entry, _)| entry)),
            None => Err(NetlinkError::Decode("empty part")),
        };
        Ok(request?)
    }

    /// The revision that we want, or the nearest that the kernel has.
    fn revision(&mut self, spec: &SetSpec) -> Result<u8, Error> {
        let kind = spec.kind;
        let nearest = |(lowest, highest)| codec::revision(spec).max(lowest).min(highest);
        if let Some(range) = self.revisions.get(&kind) {
            return Ok(nearest(*range));
        }
        let answers = self
            .socket
            .query(&codec::set_type(kind)?)
            .map_err(|error| match error {
                NetlinkError::Kernel(refusal) if refusal.code == codec::IPSET_ERR_FIND_TYPE => {
                    Error::no_type(kind)
                }
                other => other.into(),
            })?;
        let answer = answers
            .first()
            .ok_or(NetlinkError::Decode("no answer about a set type"))?;
        let range = codec::decode_set_type(answer)?;
        self.revisions.insert(kind, range);
        Ok(nearest(range))
    }
}

fn plain((set, members): (Set, Vec<Member>)) -> (Set, Vec<Entry>) {
    (set, members.into_iter().map(|(entry, _)| entry).collect())
}

/// Refuses what the kernel would take for something else, or refuse without saying which field.
fn check(change: &Change) -> Result<(), Error> {
    let refuse = |field, value: String, must| Err(Error::Value { field, value, must });
    match change {
        Change::Create(spec) if spec.kind != SetType::BitmapPort && spec.max_elements == 0 => {
            refuse(
                "max_elements",
                "0".to_owned(),
                "a set takes at least 1 entry",
            )
        }
        Change::Add(_, entry) | Change::Remove(_, entry) => check_prefix(entry),
        Change::AddWith(_, entry, options) => {
            check_prefix(entry)?;
            let of_network = matches!(entry, Entry::Net(..) | Entry::IpPortNet(..));
            if options.nomatch && !of_network {
                return refuse(
                    "nomatch",
                    entry.to_string(),
                    "only an entry with a network can be an exception",
                );
            }
            // The kernel's word for "not given".
            let counters = options.counters.unwrap_or_default();
            for (field, value) in [("packets", counters.packets), ("bytes", counters.bytes)] {
                if value == u64::MAX {
                    return refuse(field, value.to_string(), "at most 18446744073709551614");
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn check_prefix(entry: &Entry) -> Result<(), Error> {
    let (Entry::Net(net, prefix) | Entry::IpPortNet(_, _, _, net, prefix)) = entry else {
        return Ok(());
    };
    if (1..=Family::of(*net).host_prefix()).contains(prefix) {
        return Ok(());
    }
    Err(Error::Value {
        field: "prefix",
        value: format!("{net}/{prefix}"),
        must: "1 to 32 for IPv4, 1 to 128 for IPv6",
    })
}

/// Cuts changes into parts that are one message each.
fn packed(changes: &[Change]) -> Vec<Range<usize>> {
    let mut start = 0;
    changes
        .chunk_by(|a, b| match (a, b) {
            (
                Change::Add(a, _) | Change::AddWith(a, ..),
                Change::Add(b, _) | Change::AddWith(b, ..),
            )
            | (Change::Remove(a, _), Change::Remove(b, _)) => a == b,
            _ => false,
        })
        .flat_map(|run| run.chunks(MAX_ENTRIES))
        .map(|part| {
            let range = start..start + part.len();
            start = range.end;
            range
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_one_set_share_messages() {
        let name = |text: &str| text.parse::<SetName>().expect("a set name");
        let (a, b) = (name("A"), name("B"));
        let mut changes = vec![Change::Flush(a), Change::Flush(a)];
        changes.extend((0..251).map(|port| Change::Add(a, Entry::Port(port))));
        changes.extend((0..3).map(|port| Change::Add(b, Entry::Port(port))));
        changes.push(Change::Remove(b, Entry::Port(0)));
        changes.push(Change::Add(b, Entry::Port(0)));
        assert_eq!(
            packed(&changes),
            [0..1, 1..2, 2..252, 252..253, 253..256, 256..257, 257..258]
        );
        assert_eq!(packed(&[]), []);
    }
}
