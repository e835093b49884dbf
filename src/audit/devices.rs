//! Devices whose kernels are not followed: nobody is accused for an order of sums that nobody knows.
//!
//! A product or an attention that no followed kernel explains is held once more to what f16 may round in any order. If
//! that explains it, and no node of its kind was explained by a kernel of its backend that rounds on purpose, this is
//! another device than those that are followed, and what it computed cannot be judged. On a device that is followed
//! such a node is wrong: what f16 may round would hide it, but its kernel does not. Of a backend that there is no
//! recording of nobody knows that, whatever explains its other nodes; nor how it computes anything else: all its nodes are
//! held once more to what f16 may round.

use std::collections::{BTreeSet, HashMap, HashSet};

use parity_graph::{CPU_OF_ARM, Op};

use super::node::{FLASH_TILE, Held, Hypothesis, IN_F16, Sight, judge};
use super::{Checkpoint, Findings};
use crate::arithmetic::backend::{Backend, VECTOR_ROWS, VULKAN_FEW, untested};
use crate::arithmetic::{Arithmetic, Flash, Narrow};
use crate::gguf::DType;
use crate::ops::bound::UNIT_F16;
use crate::ops::source::Data;
use crate::ops::{Args, Rule, Source, Strided};

/// What kernels are told apart by: those of one kind say nothing of another.
type Class = (Backend, Kind);

/// Kinds of nodes that kernels of a device round on purpose in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Products,
    /// Those of few rows, where other kernels multiply them.
    FewProducts,
    Attention,
    /// Attention of few queries over a cache in blocks: the same kernel on old cards and new ones.
    FewQueries,
    /// Anything else, which kernels that are followed do not round on purpose.
    Others,
}

impl Kind {
    fn of(op: &Op, args: &Args<'_, f64>, backend: Option<Backend>) -> Kind {
        let rows = args.get(1).map_or(0, |rows| rows.shape()[2]);
        let few = args.get(0).is_some_and(|queries| queries.shape()[2] <= VECTOR_ROWS);
        match op {
            Op::MulMat | Op::MulMatId if backend == Some(Backend::Vulkan) && rows <= VULKAN_FEW => {
                Kind::FewProducts
            }
            Op::MulMat | Op::MulMatId => Kind::Products,
            Op::FlashAttn if few && CACHED.into_iter().any(|slot| is_in_blocks(args, slot)) => {
                Kind::FewQueries
            }
            Op::FlashAttn => Kind::Attention,
            _ => Kind::Others,
        }
    }

    fn attends(self) -> bool {
        matches!(self, Kind::Attention | Kind::FewQueries)
    }
}

/// Slots of keys and values.
const CACHED: [usize; 2] = [1, 2];

fn is_in_blocks(args: &Args<'_, f64>, slot: usize) -> bool {
    args.get(slot).is_some_and(|source| source.dtype.block_len() > 1)
}

/// Roundings to f16 on the way of an attention: of queries, weights, sums and the output. Matrix units add up terms with what the
/// largest of them leaves, which no bound of an element by itself holds: what they round is small in all.
const ROUNDINGS: f64 = 4.0;

/// What kernels are chosen by: backend, type and extents of the matrix, rows.
type Product = (Backend, DType, [usize; 4], usize);

/// What was seen of the kernels of devices.
#[derive(Default)]
pub struct Devices {
    followed: BTreeSet<Class>,
    /// What most products are computed in of which nothing is wrong, by its name.
    usual: Option<&'static str>,
    /// What products were recognised to be computed in.
    recognised: HashMap<Product, Arithmetic>,
    /// What attention shared among threads was computed in last: a program has as many all the time.
    shared: Option<Arithmetic>,
    /// Nodes that sums in any order alone explain, and how far they are from the nearest order that is known.
    unordered: Vec<(Checkpoint, Class, f64)>,
    /// With what may speak against them: nothing where the backend is not tested.
    excused: HashMap<Checkpoint, Option<Class>>,
    accused: HashSet<Checkpoint>,
    /// Attention of llama.cpp's CPU kernels with heads of whole vectors that f16 in any order explains and no order that is known.
    in_f16: HashSet<Checkpoint>,
    /// Whether such attention is explained by a known order.
    is_followed_on_cpu: bool,
}

impl Devices {
    /// Where that is known which explains most products.
    pub fn knowing(usual: Option<&'static str>) -> Devices {
        Devices { usual, ..Devices::default() }
    }

    /// Notes what was found of a node.
    pub fn note(
        &mut self,
        checkpoint: Checkpoint,
        backend: Option<&str>,
        (rule, args): (&Rule, &Args<'_, f64>),
        (recorded, sight): (&[f64], &Sight<'_>),
        held: &Held,
    ) {
        let is_shared = |one: &Arithmetic| matches!(one.flash, Flash::Split(_));
        self.shared = held.under.filter(|one| held.is_healthy() && is_shared(one)).or(self.shared);
        if attends_in_vectors(&rule.op, backend, args) {
            // Many queries are summed in f32 everywhere.
            let is_few = args.get(0).is_some_and(|queries| queries.shape()[2] < FLASH_TILE);
            let in_f16 =
                || judge(rule, args, recorded, sight, &[IN_F16]).is_ok_and(|found| found.is_healthy());
            match held.is_healthy() {
                true => self.is_followed_on_cpu |= is_few,
                false if is_few && in_f16() => drop(self.in_f16.insert(checkpoint)),
                false => drop(self.accused.insert(checkpoint)),
            }
            return;
        }
        let kind = Kind::of(&rule.op, args, backend.and_then(Backend::of));
        let is_tested = backend.and_then(untested).is_none();
        let class = backend.and_then(Backend::of).filter(|_| is_tested).map(|backend| (backend, kind));
        if is_tested && (class.is_none() || kind == Kind::Others) {
            return;
        }
        if held.is_healthy() {
            match (held.otherwise, class) {
                // In which order cuBLAS adds up depends on more than is known.
                (Some(_), Some((Backend::Cuda, _))) if is_in_f16(args) => {}
                (Some(otherwise), Some(class)) => self.unordered.push((checkpoint, class, otherwise)),
                (_, class) => self.followed.extend(class.filter(|_| held.followed)),
            }
            if let (Some(product), Some(under)) = (product(backend, args), held.under) {
                self.recognised.insert(product, under);
            }
            return;
        }
        let any_order = match kind {
            Kind::Products | Kind::FewProducts => Backend::any_order(false),
            Kind::Attention | Kind::FewQueries => Backend::any_order(true),
            Kind::Others => Backend::any_function(),
        };
        let cache = if kind.attends() { in_half(args) } else { Vec::new() };
        let args = &Args { sources: over(args, &cache), ..*args };
        let is_as_large = |held: &Held| {
            let [error, exact, _] = held.squares;
            kind.attends() && held.nonfinite == 0 && error.sqrt() <= ROUNDINGS * UNIT_F16 * exact.sqrt()
        };
        let held = judge(rule, args, recorded, sight, &[any_order]);
        if held.is_ok_and(|held| held.is_healthy() || is_as_large(&held)) {
            self.excused.insert(checkpoint, class);
        } else {
            self.accused.insert(checkpoint);
        }
    }

    /// What is tried of a node: what another one of its shape was recognised to be computed in comes first, or what most
    /// products are.
    pub fn likely(
        &self,
        backend: Option<&str>,
        args: &Args<'_, f64>,
        mut tried: Vec<Hypothesis>,
    ) -> Vec<Hypothesis> {
        let known = product(backend, args).and_then(|product| self.recognised.get(&product));
        let is_known = |one: &Hypothesis| [known, self.shared.as_ref()].contains(&Some(&one.arithmetic));
        let usual = self.usual(args, &tried).map(|usual| usual.arithmetic);
        let is_usual = |one: &Hypothesis| usual == Some(one.arithmetic);
        let at = tried.iter().position(is_known).or_else(|| tried.iter().position(is_usual));
        if let Some(at) = at {
            tried[..=at].rotate_right(1);
        }
        tried
    }

    /// What most products are computed in, of what is tried of one.
    pub fn usual<'t>(&self, args: &Args<'_, f64>, tried: &'t [Hypothesis]) -> Option<&'t Hypothesis> {
        let is_product = args.get(0).is_some_and(|source| matches!(source.data, Data::Weight(_)));
        tried.iter().find(|one| is_product && self.usual == Some(one.name))
    }

    /// Takes back what was found of nodes whose kernels are not followed, and that others are healthy whose kernels are.
    pub fn excuse(self, findings: &mut Findings) {
        let is_excused = |id: &&Checkpoint| !self.is_followed_on_cpu && !self.accused.contains(*id);
        self.in_f16.iter().filter(is_excused).for_each(|id| findings.at(*id).needs = Some(NEEDS_F32));
        for (checkpoint, class, otherwise) in self.unordered {
            if self.followed.contains(&class) {
                findings.at(checkpoint).is_other_kernel(otherwise);
            }
        }
        for (checkpoint, class) in self.excused {
            if !class.is_some_and(|class| self.followed.contains(&class))
                && !self.accused.contains(&checkpoint)
            {
                findings.at(checkpoint).give_up(match class {
                    Some(_) => {
                        "a device whose kernels parity follows (docs/backends.md): this one keeps its sums in f16, in an \
                         order of its own, or in f32 where f16 is switched off"
                    }
                    None => {
                        "a backend that parity is tested with (docs/backends.md): of this one nobody knows what its kernels \
                         round, and f16 would explain it"
                    }
                });
            }
        }
    }
}

/// What attention needs whose products may be summed in f16.
const NEEDS_F32: &str = "a build of llama.cpp whose CPU kernels sum products of keys in f32: one for processors that compute in f16 \
                         themselves (-march=native where there is AVX512-FP16) sums them in f16, in an order of its own, which \
                         would explain it";

/// Elements of a head from which on CPUs that compute in f16 sum its products so (`GGML_F16_STEP` of ggml-cpu).
const VECTOR: usize = 128;

/// Whether it is attention on a CPU, over keys in f16 whose heads fill such vectors.
fn attends_in_vectors(op: &Op, backend: Option<&str>, args: &Args<'_, f64>) -> bool {
    let is_on_cpu = backend.is_some_and(|backend| Backend::of(backend).is_none() && backend != CPU_OF_ARM);
    let is_wide = |slot: usize| {
        args.get(slot).is_some_and(|keys| keys.dtype == DType::F16 && keys.shape()[3] >= VECTOR)
    };
    *op == Op::FlashAttn && is_on_cpu && is_wide(1)
}

/// Whether a product is of a matrix in f16.
fn is_in_f16(args: &Args<'_, f64>) -> bool {
    args.get(0).is_some_and(|weight| weight.dtype == DType::F16)
}

/// By what a device chooses a kernel for a node.
fn product(backend: Option<&str>, args: &Args<'_, f64>) -> Option<Product> {
    let weight = args.get(0)?;
    Some((backend.and_then(Backend::of)?, weight.dtype, weight.shape(), args.get(1)?.shape()[2]))
}

/// Keys and values in blocks as kernels on f16 convert them, by slot.
fn in_half(args: &Args<'_, f64>) -> Vec<(usize, Vec<f64>)> {
    let of = |slot: usize| {
        let mut values = args.get(slot)?.values().into_owned();
        Narrow::F16.store(&mut values);
        Some((slot, values))
    };
    CACHED.into_iter().filter(|slot| is_in_blocks(args, *slot)).filter_map(of).collect()
}

/// The sources, with a converted cache in place of their own.
fn over<'b>(args: &'b Args<'_, f64>, cache: &'b [(usize, Vec<f64>)]) -> Vec<Option<Source<'b, f64>>> {
    let converted = |slot: usize| {
        let (_, values) = cache.iter().find(|(known, _)| *known == slot)?;
        Some(Strided::whole(values, args.get(slot)?.shape()))
    };
    let mut sources = args.replaced(converted);
    for (slot, _) in cache {
        sources[*slot].iter_mut().for_each(|source| source.dtype = DType::F16);
    }
    sources
}
