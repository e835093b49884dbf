//! The GPU engine: the same graph and the same probe as on the CPU, by hand-written kernels.
//!
//! A step is a list of kernel launches ([`plan`]) over an arena in which every wanted value has bytes of its own
//! ([`layout`]); a second stream brings them to the host while the GPU computes on ([`readback`]), or compares them with
//! a reference there ([`compare`], [`held`]). Asking for a
//! checkpoint changes where values lie and what is copied, never a launch that computes. A node that no kernel
//! computes, which in a healthy model is none, is executed by the host's code on downloaded inputs. Where a probe
//! feeds values a step is computed node by node ([`isolated`]). A model that is larger than one GPU is cut into
//! contiguous parts, each with an engine of its own that hands its last value to the next ([`cards`]).

pub mod calls;

mod cards;
mod compare;
mod cut;
mod device;
mod event;
mod greedy;
mod held;
mod host;
mod isolated;
mod layout;
mod link;
mod maps;
mod modules;
mod multiplier;
mod plan;
mod products;
mod readback;
mod returned;
mod ropes;
mod schedule;
pub mod single;
mod step;
mod weights;

use std::collections::HashMap;

use cudarc::driver::CudaGraph;

use super::{Batch, Engine, Probe};
use crate::checkpoint::Checkpoint;
use crate::engine::fused::graph::{Graph, Op};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::numerics::{Numerics, Products, Storage};
use calls::{Call, LinearKernel, TensorCores};
use compare::Compare;
use cut::Part;
use device::{Buffer, Device, address_of, error};
use greedy::Choice;
use layout::{Layout, bytes_of};
use modules::Modules;
use parity_dump::manifest::Producer;
use plan::{Key, Memory, Plan, Work};
use readback::{Logits, Ring, Transfers};
use ropes::Tables;
use schedule::Ability;
use step::unplanned;
use weights::Weights;

pub use cards::Cards;
pub use device::{bandwidth, count, free_memory};
pub use multiplier::Multiplier;

/// Positions that the cache has room for at first; it doubles when they are used up, until it has so many, and grows by an
/// eighth of what doubling would give from there on.
const POSITIONS_MIN: usize = 1024;
const POSITIONS_DOUBLED: usize = 8192;
const GROWTH: usize = 8;

/// What this engine computes with when it is asked for `numerics`: `f32` is the exact way (decoded weights, f32
/// values and accumulation, the cache in f32 or f16), `f16` the fast one (tensor cores: f16 operands, values and
/// cache, f32 accumulation).
pub fn supported(numerics: Numerics) -> Result<Numerics> {
    match numerics.products {
        Products::F32 if numerics.storage == Storage::F32 && numerics.kv != Storage::Bf16 => {
            Ok(Numerics { flash: true, ..numerics })
        }
        Products::F16 if numerics.storage != Storage::Bf16 && numerics.kv != Storage::Bf16 => Ok(Numerics {
            products: Products::F16,
            storage: Storage::F16,
            kv: Storage::F16,
            flash: true,
            ..Numerics::default()
        }),
        _ => Err(error("the GPU engine does not compute with this arithmetic")
            .expected("f32 (exact), `f32 kv=f16`, or f16 (fast: tensor cores)")
            .found(numerics)
            .hint("--device cpu computes with any")),
    }
}

/// A plan, and what its steps take beside the engine's memory.
struct Planned {
    plan: Plan,
    transfers: Transfers,
    /// All of its work as one launch, from the second step on.
    graph: Option<CudaGraph>,
    /// Whether it may become one: not where that has failed.
    recordable: bool,
}

/// Executes a graph, or a part of one, on an NVIDIA GPU.
pub struct CudaEngine<'m> {
    gguf: &'m Gguf,
    graph: Graph,
    /// What the part of the graph before this one hands over, and what this one does.
    given: Option<Checkpoint>,
    handed: Option<Checkpoint>,
    numerics: Numerics,
    // Dropped in this order: what lies on the device before the device.
    choice: Option<Choice>,
    plan: Option<Planned>,
    /// The plan before it, which is kept: prefill and decode often take turns.
    earlier: Option<Planned>,
    ring: Ring,
    logits: Option<Logits>,
    compare: Compare,
    arena: Option<Buffer>,
    cache: HashMap<Checkpoint, Buffer>,
    /// Where blocks of attention leave their sums.
    attention: Option<Buffer>,
    ropes: Tables,
    weights: Weights,
    modules: Modules,
    /// First position, then the tokens of the step.
    step_data: Option<Buffer>,
    /// Decoded weights of one launch.
    scratch: Option<Buffer>,
    /// Positions that the cache has room for.
    capacity: usize,
    /// Positions computed so far.
    computed: usize,
    device: Device,
}

impl<'m> CudaEngine<'m> {
    /// An engine for `graph` on GPU `ordinal`, with an arithmetic that is [`supported`].
    ///
    /// # Errors
    /// No driver, a driver or GPU that is too old, not enough memory for the weights.
    pub fn new(gguf: &'m Gguf, graph: Graph, ordinal: usize, numerics: Numerics) -> Result<Self> {
        CudaEngine::of_part(gguf, Part::whole(graph), Device::open(ordinal)?, numerics)
    }

    /// An engine for a part of a graph on a GPU.
    fn of_part(gguf: &'m Gguf, part: Part, mut device: Device, numerics: Numerics) -> Result<Self> {
        device.bind()?;
        let modules = Modules::load(&device)?;
        device.overlaps = modules.overlap;
        let weights = Weights::upload(&device, gguf, &part.graph)?;
        Ok(CudaEngine {
            gguf,
            graph: part.graph,
            given: part.given,
            handed: part.handed,
            numerics,
            choice: None,
            plan: None,
            earlier: None,
            ring: Ring::default(),
            logits: None,
            compare: Compare::default(),
            arena: None,
            cache: HashMap::new(),
            attention: None,
            ropes: Tables::default(),
            weights,
            modules,
            step_data: None,
            scratch: None,
            capacity: 0,
            computed: 0,
            device,
        })
    }

    /// Where the kernels come from: which artefact, and which of the user's files replace parts of it.
    pub fn kernels(&self) -> &str {
        &self.modules.origin
    }

    /// CUDA version of the driver, 1000·major + 10·minor, and compute capability.
    pub fn driver(&self) -> (i32, (i32, i32)) {
        (self.device.driver, self.device.capability)
    }
}

impl Drop for CudaEngine<'_> {
    fn drop(&mut self) {
        // Before the memory that it reads and writes; an error can be reported nowhere.
        let _ = self.settle();
    }
}

impl Engine for CudaEngine<'_> {
    fn producer(&self) -> Producer {
        Producer {
            name: "parity".to_owned(),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            backend: Some("cuda".to_owned()),
            device: Some(self.device.name.clone()),
            numerics: Some(self.numerics.to_string()),
        }
    }

    fn reset(&mut self) {
        self.computed = 0;
    }

    fn step(&mut self, batch: &Batch<'_>, probe: &mut dyn Probe) -> Result<Option<Vec<f32>>> {
        let logits = self.prepared_step(batch, probe);
        match &logits {
            Ok(_) => self.computed = batch.first + batch.tokens.len(),
            // Before the next step takes memory that is written to. The error that is reported is the first.
            Err(_) => drop(self.settle()),
        }
        logits
    }
}

impl CudaEngine<'_> {
    /// What the tensor cores can do with the kernels that are loaded.
    fn cores(&self) -> TensorCores {
        TensorCores {
            tf32: self.device.capability.0 >= calls::TF32_SINCE,
            warpgroups: self.modules.warpgroups,
        }
    }

    fn check(&self, batch: &Batch<'_>) -> Result<()> {
        if batch.tokens.is_empty() || batch.first != self.computed {
            return Err(Error::new("engine", "a step must follow the steps before it")
                .expected(format!("tokens from position {}", self.computed))
                .found(format!("{} tokens from position {}", batch.tokens.len(), batch.first)));
        }
        let vocab = self.graph.dims.vocab;
        match batch.tokens.iter().find(|&&token| token as usize >= vocab) {
            None => Ok(()),
            Some(token) => Err(Error::new("engine", "a token beyond the vocabulary")
                .expected(format!("tokens below {vocab}"))
                .found(token)
                .hint("parity inspect MODEL -p TEXT --format json gives the tokens of a text")),
        }
    }

    /// Room in the cache for positions up to `end`; keeps what is in it.
    fn make_room(&mut self, end: usize) -> Result<()> {
        if end <= self.capacity {
            return Ok(());
        }
        self.compare.forget(&self.device)?;
        let doubled = end.next_power_of_two().max(POSITIONS_MIN);
        let capacity =
            if doubled <= POSITIONS_DOUBLED { doubled } else { end.next_multiple_of(doubled / GROWTH) };
        (self.plan, self.earlier) = (None, None);
        for checkpoint in schedule::cached(&self.graph) {
            let row = self.graph.dims.width(checkpoint.kind(), 0) * bytes_of(self.numerics.kv);
            let grown = self.device.alloc("the KV cache", capacity * row)?;
            if let Some(old) = self.cache.get(&checkpoint) {
                self.device.copy_within(old.address, grown.address, self.computed * row)?;
                self.device.synchronize()?;
            }
            self.cache.insert(checkpoint, grown);
        }
        let dims = &self.graph.dims;
        let bytes = calls::attention_room(dims.heads, dims.head_width, capacity);
        let room = self.device.alloc("the sums of attention", bytes)?;
        self.device.clear(&room)?;
        self.attention = Some(room);
        self.capacity = capacity;
        Ok(())
    }

    /// The plan for this step, made anew unless one of the last two fits.
    fn make_plan(&mut self, batch: &Batch<'_>, probe: &dyn Probe) -> Result<()> {
        let rows = batch.tokens.len();
        let wanted: Vec<bool> = self.graph.checkpoints().map(|checkpoint| probe.wants(checkpoint)).collect();
        let inside =
            self.graph.checkpoints().zip(&wanted).any(|(c, wanted)| *wanted && c.kind().is_optional());
        let compared =
            self.graph.checkpoints().zip(&wanted).map(|(c, wanted)| *wanted && probe.compares(c, batch));
        let fed = probe.feeds();
        let compared: Vec<bool> = compared.map(|compared| compared && !fed).collect();
        let key = Key { rows, cached: inside.then_some(batch.first + rows), wanted, compared, fed };
        let fits = |planned: &Option<Planned>| planned.as_ref().is_some_and(|it| it.plan.key == key);
        if fits(&self.plan) {
            return self.capture();
        }
        self.device.synchronize()?;
        std::mem::swap(&mut self.plan, &mut self.earlier);
        if fits(&self.plan) {
            return self.capture();
        }
        self.plan = None;
        self.compare.forget(&self.device)?;
        self.plan = Some(self.new_plan(key)?);
        Ok(())
    }

    fn new_plan(&mut self, key: Key) -> Result<Planned> {
        let (rows, fed) = (key.rows, key.fed);
        let listed = |marks: &[bool]| -> Vec<Checkpoint> {
            self.graph.checkpoints().zip(marks).filter(|(_, mark)| **mark).map(|(c, _)| c).collect()
        };
        let (list, compared) = (listed(&key.wanted), listed(&key.compared));
        let wants = |checkpoint: Checkpoint| list.contains(&checkpoint);
        let nodes = schedule::nodes(&self.graph, wants, fed);
        for node in &nodes {
            if let Op::Rope(rope) = &node.op {
                self.ropes.make(&self.device, self.gguf, rope, self.capacity)?;
            }
        }
        let ability =
            Ability { graph: &self.graph, given: self.given, weights: &self.weights, ropes: &self.ropes };
        let tasks = if fed {
            ability.apart(&nodes)
        } else {
            ability.schedule(&nodes, rows, self.numerics.storage, self.cores())
        };
        let mut values = schedule::values(&self.graph, &nodes, &tasks, &key, wants);
        self.add_border(&mut values, &nodes, &tasks, rows);
        let layout = Layout::new(&values, &self.numerics);
        let unpacks = LinearKernel::for_step(rows, self.numerics.storage, false, self.cores()).takes_halves();
        let scratch = if unpacks { products::scratch_bytes(&nodes, &tasks, &self.weights) } else { 0 };
        self.make_memory(layout.bytes, scratch, rows)?;
        let step_data = address_of(&self.step_data);
        let memory = Memory {
            weights: &self.weights,
            cache: &self.cache.iter().map(|(c, buffer)| (*c, buffer.address)).collect(),
            ropes: &self.ropes,
            first: step_data,
            tokens: step_data + 4,
            arena: address_of(&self.arena),
            attention: (address_of(&self.attention), self.capacity),
            scratch: address_of(&self.scratch),
            shared_max: self.device.shared_max as usize,
            cores: self.cores(),
        };
        let wanted = (&list[..], &compared[..]);
        let plan = Plan::new(&self.graph, (nodes, &tasks), (key, layout), wanted, &self.numerics, &memory);
        let transfers = Transfers::new(&self.device, &plan.outputs)?;
        if plan.logits.is_some() && self.logits.is_none() {
            self.logits = Some(Logits::new(&self.device, self.graph.dims.vocab)?);
        }
        Ok(Planned { plan, transfers, graph: None, recordable: true })
    }

    /// Arena, room for decoded weights and token buffer, grown where they are too small: then the plan before this one,
    /// which says where they are, is of no use.
    fn make_memory(&mut self, arena: usize, scratch: usize, rows: usize) -> Result<()> {
        let step_data = 4 * (rows + 1);
        let what = format!("the values of {rows} tokens");
        for (buffer, what, bytes) in [
            (&mut self.scratch, "decoded weights", scratch),
            (&mut self.arena, &what, arena),
            (&mut self.step_data, "the tokens", step_data),
        ] {
            if buffer.as_ref().map_or(0, |buffer| buffer.bytes) < bytes {
                (*buffer, self.earlier) = (None, None);
                *buffer = Some(self.device.alloc(what, bytes)?);
            }
        }
        Ok(())
    }

    fn send_tokens(&self, batch: &Batch<'_>) -> Result<()> {
        let mut data = vec![batch.first as u32];
        data.extend_from_slice(batch.tokens);
        self.device.upload(&data, address_of(&self.step_data))
    }

    /// Enqueues the launches of the plan, and `next` behind them.
    fn enqueue(&mut self, next: Option<&Call>) -> Result<()> {
        let Some(Planned { plan, .. }) = &self.plan else { return Err(unplanned()) };
        let launches = plan.work.iter().filter_map(|work| match work {
            Work::Launch(call) => Some(call),
            _ => None,
        });
        for call in launches.chain(next) {
            self.device.launch(self.modules.function(call, &self.device)?, call)?;
        }
        Ok(())
    }
}
