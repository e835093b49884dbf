//! Graphs that come again and again: what is known of each is found out once.

use std::cell::OnceCell;
use std::sync::Arc;

use super::Recorder;
use crate::api::{RawGraph, RawSched};
use crate::describe::{Described, Reader};
use crate::image::Image;
use crate::kept;
use crate::map::{Mapping, map};

/// Graphs that are kept to be recognised.
const GRAPHS_KEPT: usize = 8;

/// A graph that is about to be computed, or was.
pub(super) struct Seen {
    pub described: Described,
    /// Its number among those that are kept.
    pub number: usize,
    pub mapping: Arc<Mapping>,
    image: Option<Image>,
    survivors: OnceCell<Vec<bool>>,
}

impl Seen {
    /// As [`kept::survivors`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn survivors(&self, reader: Reader<'_>) -> &[bool] {
        // SAFETY: by the caller's promise.
        self.survivors.get_or_init(|| unsafe { kept::survivors(reader, &self.described) })
    }
}

impl Recorder {
    /// What is known of a graph that is about to be computed: what was known when it was computed last, where it is the same.
    ///
    /// # Safety
    /// As for [`Recorder::begin`].
    pub(super) unsafe fn see(&mut self, reader: Reader<'_>, sched: RawSched, graph: RawGraph) -> Seen {
        let last = self.last.take();
        // SAFETY: by the caller's promise.
        let still = |image: &Image| unsafe { image.is_still(reader, sched, graph) };
        if let Some(seen) = last.filter(|seen| seen.image.as_ref().is_some_and(still)) {
            return seen;
        }
        // SAFETY: by the caller's promise.
        let described = unsafe { reader.describe(sched, graph) };
        let (number, mapping) = self.analyse(&described);
        // SAFETY: as above.
        let image = unsafe { Image::of(reader, sched, graph, &described) };
        Seen { described, number, mapping, image, survivors: OnceCell::new() }
    }

    /// Number of a graph, and what it holds: found out once for each of the graphs that come again and again.
    fn analyse(&mut self, Described { graph, .. }: &Described) -> (usize, Arc<Mapping>) {
        if let Some(number) = self.graphs.iter().position(|(known, _)| known == graph) {
            return (number, Arc::clone(&self.graphs[number].1));
        }
        if self.graphs.len() == GRAPHS_KEPT {
            // Where every pass has a graph of its own, as in old releases, none comes again.
            self.graphs.clear();
            self.written.clear();
        }
        let mapping = Arc::new(map(graph));
        self.graphs.push((graph.clone(), Arc::clone(&mapping)));
        self.written.push(None);
        (self.graphs.len() - 1, mapping)
    }
}
