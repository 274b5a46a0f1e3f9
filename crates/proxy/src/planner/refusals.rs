//! What is left out of Services, told once each.

use std::collections::{BTreeMap, BTreeSet};

use super::Planner;
use crate::guard::{Cause, Refused};
use crate::model::ObjectName;

/// The most causes of one Service that are remembered as told.
const REMEMBERED: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// What was told of a Service, until that goes: what comes and goes with endpoints is told once.
    told: BTreeMap<ObjectName, BTreeSet<(Cause, String)>>,
    news: Vec<Refused>,
}

impl Refusals {
    /// Notes what is left out of a Service, `None` when that is gone.
    pub(super) fn note(&mut self, name: &ObjectName, refused: Option<&[Refused]>) {
        let Some(refused) = refused else {
            self.told.remove(name);
            return;
        };
        for refused in refused {
            self.note_more(refused.clone());
        }
    }

    /// Notes one thing that is left out of a Service.
    pub(super) fn note_more(&mut self, refused: Refused) {
        let told = self.told.entry(refused.service.clone()).or_default();
        if told.len() >= REMEMBERED {
            told.clear();
        }
        if told.insert((refused.cause, refused.first.clone())) {
            self.news.push(refused);
        }
    }
}

impl Planner {
    /// What is left out of Services and was not told yet: one for each Service and cause.
    pub fn take_refused(&mut self) -> Vec<Refused> {
        std::mem::take(&mut self.refusals.news)
    }
}
