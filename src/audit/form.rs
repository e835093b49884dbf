//! The form in which a graph is built for a dump that brings none: on which backend of llama.cpp, with attention as one node
//! or as two products, over keys and values in f16, in quantised blocks or as they are. A declaration says; where values of
//! attention say otherwise, they are believed.

mod layers;
mod over_blocks;

use std::collections::HashSet;

use super::graphs::LLAMA_CPP;
use super::{AuditRows, Finding, Findings, Graphs, How, Labelled, audit};
use crate::arithmetic::backend::Backend;
use crate::checkpoint::{Checkpoint, Kind};
use crate::dump::Recording;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::model::builders::Cache;
use crate::numerics::{Numerics, Products, Storage};
use parity_dump::Dump;

/// Rows of each node that decide.
const ROWS: usize = 4;
/// What llama.cpp calls the CPU among the devices that computed something.
const CPU: &str = "CPU";
/// Layers whose nodes decide.
const LAYERS: usize = 2;

/// How llama.cpp may have computed a graph.
#[derive(Clone, Copy, PartialEq)]
pub struct Form {
    /// The buffer of its nodes; `None` of the CPU and of other engines.
    pub backend: Option<&'static str>,
    /// Whether attention is one node.
    pub flash: bool,
    /// What keys and values are kept in.
    pub cache: Cache,
    /// How many of the first layers are on the CPU all the same.
    pub on_cpu: u32,
}

impl Form {
    /// What any engine may have computed: attention as one node, keys and values as they are.
    const ANY: Form = Form { backend: None, flash: true, cache: Cache::F32, on_cpu: 0 };

    /// The form that a dump declares: what declares a backend of llama.cpp computed llama.cpp's graph, on that backend, with
    /// the cache and the attention that it declares.
    pub fn declared(dump: &Dump) -> Form {
        let words = dump.manifest().producer.numerics.as_deref();
        let numerics = words.and_then(|words| words.parse::<Numerics>().ok());
        let of_device = numerics.and_then(|numerics| Some((numerics, Backend::declared(numerics.products)?)));
        of_device.map_or(Form::ANY, |(numerics, backend)| Form {
            backend: Some(backend),
            flash: numerics.flash,
            cache: match numerics.kv {
                Storage::F32 => Cache::F32,
                Storage::F16 => Cache::F16,
                Storage::Bf16 => Cache::BF16,
            },
            on_cpu: 0,
        })
    }

    /// All that may have been, what is declared first: words on cache and attention are easily left out, and llama.cpp's
    /// default is one node over keys and values in f16. What names a backend of llama.cpp and declares nothing may have been
    /// computed on it, or on the CPU. Another engine that declares a backend may round as that does and sum as it likes: what
    /// any engine may have computed is the last. Of one that declares nothing it is the first, and it may have the kernels of
    /// llama.cpp's CUDA, as many engines do that are built on it.
    fn possible(dump: &Dump) -> Vec<Form> {
        let declared = Form::declared(dump);
        let producer = &dump.manifest().producer;
        let named = match producer.backend.as_deref() {
            Some("cuda") => Backend::declared(Products::LlamaCuda),
            Some("vulkan") => Backend::declared(Products::LlamaVulkan),
            _ => None,
        };
        let named = named.filter(|_| producer.name == LLAMA_CPP && producer.numerics.is_none());
        let of = |backend| move |(flash, cache)| Form { backend: Some(backend), flash, cache, on_cpu: 0 };
        let Some(backend) = declared.backend.or(named) else {
            let is_open = producer.name != LLAMA_CPP && producer.numerics.is_none();
            let guessed = Backend::declared(Products::LlamaCuda).filter(|_| is_open);
            let kinds = |cuda| [(true, Cache::F16), (false, Cache::F16)].map(of(cuda));
            return std::iter::once(declared).chain(guessed.into_iter().flat_map(kinds)).collect();
        };
        let kinds = [(true, Cache::F16), (false, Cache::F16), (false, Cache::F32), (true, Cache::F32)];
        let first = Some(declared).filter(|form| form.backend.is_some());
        let others = kinds.map(of(backend)).into_iter().filter(|form| Some(*form) != first);
        let last = match declared.backend {
            Some(_) => Some(Form::ANY).filter(|_| producer.name != LLAMA_CPP),
            None => Some(declared),
        };
        first.into_iter().chain(others).chain(last).collect()
    }

    /// In words, where the dump declares another.
    fn words(&self, declared: &Form) -> String {
        let cache = self.cache.words();
        if let (None, Some(backend)) = (self.backend, declared.backend) {
            let backend = backend.trim_end_matches('0');
            return format!(
                "its attention is not that of llama.cpp on {backend}, which it declares: judged as any engine's"
            );
        }
        // Of another engine nothing else is known by it.
        let Some(backend) = self.backend else { return format!("known by what attention came to: {cache}") };
        let attention = if self.flash { "flash attention" } else { "attention as two products" };
        let backend = backend.trim_end_matches('0');
        format!("what computed it is known by its values: {attention} over {cache}, on {backend}")
    }
}

impl Graphs {
    /// Builds graphs in the form that leaves fewest rows of attention unexplained in the first layers, the declared one where
    /// no other leaves fewer. On a backend that is not declared only where that explains most products.
    ///
    /// # Errors
    /// Those of [`Graphs::built`], and of an audit.
    pub(super) fn built_as_computed(dump: &Dump, gguf: &Gguf) -> Result<Graphs> {
        let (ids, declared) = (deciding(dump), Form::declared(dump));
        if ids.is_empty() {
            return Graphs::built(dump, gguf);
        }
        let mut best: Option<(Vec<usize>, Form, Graphs)> = None;
        let is_llama = dump.manifest().producer.name == LLAMA_CPP;
        for form in Form::possible(dump) {
            if form.backend.is_none() && is_llama && best.is_some() {
                break;
            }
            let Some((left, graphs)) = Graphs::unexplained(dump, gguf, &ids, form)? else { continue };
            let is_whole = left.iter().all(|rows| *rows == 0);
            // What nobody declares or names is believed where it leaves nothing open.
            if !is_whole && !is_llama && form.backend.is_some() && declared.backend.is_none() {
                continue;
            }
            let rows = |left: &[usize]| left.iter().sum::<usize>();
            if best.as_ref().is_none_or(|(least, ..)| rows(&left) < rows(least)) {
                best = Some((left, form, graphs));
            }
            if is_whole {
                break;
            }
        }
        let Some((left, form, graphs)) = best else { return Graphs::built(dump, gguf) };
        if form.backend.is_some()
            && is_llama
            && dump.manifest().producer.device.as_deref().is_some_and(|device| device.contains(CPU))
            && let Some(graphs) = Graphs::begun_on_cpu(dump, gguf, form)?
        {
            return Ok(graphs);
        }
        if left.iter().any(|rows| *rows > 0)
            && let Some(graphs) = Graphs::over_blocks(dump, gguf, &ids, (form, &left))?
        {
            return Ok(graphs);
        }
        Ok(if form == declared { graphs } else { graphs.saying(form.words(&declared)) })
    }

    /// The graphs in a form, and how many rows of attention in each of the first layers they leave unexplained; `None` where
    /// that is no form of the dump: on a backend that is not declared only what explains most products is one.
    fn unexplained(
        dump: &Dump,
        gguf: &Gguf,
        ids: &HashSet<Checkpoint>,
        form: Form,
    ) -> Result<Option<(Vec<usize>, Graphs)>> {
        let graphs = Graphs::built_in(dump, gguf, form)?;
        let findings = graphs.sampled(dump, gguf, ids, ROWS)?;
        let (attention, products): (Vec<_>, Vec<_>) =
            findings.nodes.iter().partition(|(id, _)| id.kind() == Kind::AttnCtx);
        let wrong = products.iter().filter(|(_, finding)| finding.is_wrong()).count();
        if form.backend != Form::declared(dump).backend && 2 * wrong > products.len() {
            return Ok(None);
        }
        // What cannot be judged in a form is not explained by it, nor is what a guess explains as it would a mistake.
        let is_guess = form.backend.is_some() && Form::declared(dump) == Form::ANY;
        let explains = |finding: &Finding| finding.judged > 0 && !(is_guess && finding.is_blind());
        let rows = |finding: &Finding| if explains(finding) { finding.rows_beyond() } else { ROWS };
        Ok(Some((attention.into_iter().map(|(_, finding)| rows(finding)).collect(), graphs)))
    }

    /// What an audit of a sample of rows finds of some nodes.
    ///
    /// # Errors
    /// Those of an audit.
    pub(super) fn sampled(
        &self,
        dump: &Dump,
        gguf: &Gguf,
        ids: &HashSet<Checkpoint>,
        rows: usize,
    ) -> Result<Findings> {
        let wants = |id: Checkpoint| ids.contains(&id);
        let how = How { rows: AuditRows::Only(rows), wants: &wants, diagnose: None, look: None, only: None };
        let steps: Vec<(usize, &Labelled)> = self.steps();
        audit(&self.judged(dump, dump), &steps, gguf, &how)
    }
}

/// The nodes that tell one form from another: attention of the first layers that hold it, and the products before it where
/// the backend is not known.
fn deciding(dump: &Dump) -> HashSet<Checkpoint> {
    let held = Recording::checkpoints(dump);
    let mut layers: Vec<Option<u32>> =
        held.iter().filter(|id| id.kind() == Kind::AttnCtx).map(|id| id.layer_index()).collect();
    layers.sort_unstable();
    layers.dedup();
    layers.truncate(LAYERS);
    let is_open = Form::possible(dump).len() > 1;
    let decides = |id: &Checkpoint| {
        (id.kind() == Kind::AttnCtx
            || is_open && matches!(id.kind(), Kind::QProj | Kind::KProj | Kind::VProj))
            && layers.contains(&id.layer_index())
    };
    held.iter().copied().filter(decides).collect()
}
