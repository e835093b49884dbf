//! The recordings of a process: one for each context that computes.

use std::sync::Arc;

use parity_record::recorder::{Recorder, another};

use crate::host::{Asked, Parent};
use crate::life;

/// The recording of one context.
struct Side {
    recorder: Recorder,
    /// Its scheduler and its context, 0 until a pass of it was seen; a context may stay unknown.
    sched: usize,
    context: usize,
}

/// One for each context that has computed, in the order in which they began, and one for the next: never none.
pub struct Sides {
    all: Vec<Side>,
    asked: Asked,
}

impl Sides {
    /// Recordings of contexts that are still to come.
    pub fn new(asked: Asked) -> Sides {
        let mut sides = Sides { all: Vec::new(), asked };
        sides.next();
        sides
    }

    /// A recording of the next context: in the folder itself of the first, and in one of its own within it of any other, which
    /// no mistake, and no token of another run, is put into.
    fn next(&mut self) {
        let mut options = self.asked.options.clone();
        let number = self.all.len();
        if number > 0 {
            options.dir = options.dir.map(|dir| dir.join(another(number)));
            (options.hashes, options.graphs, options.inject, options.forced) = (None, None, None, None);
        }
        let recorder = Recorder::new(options, Arc::new(Parent::new(self.asked.shared.clone(), number == 0)));
        self.all.push(Side { recorder, sched: 0, context: 0 });
    }

    /// The side that `is` one, or the one for the next context.
    fn side(&mut self, is: impl Fn(&Side) -> bool) -> &mut Side {
        let place = self.all.iter().position(is).unwrap_or(self.all.len() - 1);
        &mut self.all[place]
    }

    /// The recording of the first context.
    pub fn first(&self) -> &Recorder {
        &self.all[0].recorder
    }

    /// All of them.
    pub fn each(&mut self, see: impl Fn(&mut Recorder)) {
        self.all.iter_mut().for_each(|side| see(&mut side.recorder));
    }

    /// Waits until all that was recorded is written.
    pub fn settle(&mut self) {
        self.each(Recorder::settle);
        if let Some(shared) = &self.asked.shared {
            Parent::settled(shared);
        }
    }

    /// Notes llama.cpp's version, for all manifests.
    pub fn set_version(&mut self, version: Option<String>) {
        self.each(|recorder| recorder.set_version(version.clone()));
        self.asked.options.version = version;
    }

    /// The recording of what a scheduler computes.
    pub fn of_sched(&mut self, sched: usize) -> &mut Recorder {
        &mut self.side(|side| side.sched == sched).recorder
    }

    /// The recording of a context, by itself or its memory.
    pub fn of_context(&mut self, is: impl Fn(usize) -> bool) -> &mut Recorder {
        let is_it = |side: &Side| !side.recorder.is_tower() && (side.context == 0 || is(side.context));
        &mut self.side(|side| side.sched != 0 && is_it(side)).recorder
    }

    /// Notes which context computes with a scheduler, once the recording of that has begun: the memory of one that was freed may be
    /// another's.
    pub fn begun(&mut self, sched: usize) {
        let side = self.side(|side| side.sched == sched);
        if side.recorder.is_of(sched) {
            let is_new = side.sched == 0;
            (side.sched, side.context) = (sched, life::last());
            if is_new {
                self.next();
            }
        }
    }
}
