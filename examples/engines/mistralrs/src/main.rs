//! Runs a GGUF file of a Qwen2 or Qwen3 model with mistral.rs, and dumps every tensor through the crate `parity-dump`.
//!
//!     run.sh MODEL.gguf TOKEN,TOKEN,… [--decode N] [--dump FOLDER] [--dtype f32|f16|bf16]
//!
//! The engine is the published one; what shows its tensors is `observe.patch`.

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use mistralrs_core::observe::observe;
use mistralrs_core::{
    AutoDeviceMapParams, DefaultSchedulerMethod, DeviceMapSetting, GGUFLoaderBuilder, GGUFSpecificConfig,
    MistralRsBuilder, ModelDType, NormalRequest, Request, RequestMessage, Response, SamplingParams,
    SchedulerConfig, TokenSource,
};
use parity_dump::{Element, ModelInfo, Producer, Writer};

/// The version that Cargo.toml asks for.
const MISTRALRS: &str = "0.8.1";
/// Tensors of a step: tokens, embed, final_norm and logits, and those of each layer.
const GLOBAL_TENSORS: usize = 4;
const LAYER_TENSORS: usize = 14;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What was shown so far.
struct Dump {
    writer: Writer,
    /// Token rows of the passes before this one.
    before: u32,
    /// Token rows of this one.
    rows: u32,
    layers: usize,
}

impl Dump {
    /// A tensor of mistral.rs: axes of one entry in front of the token rows, then those of a dump.
    fn put(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        if name == "tokens" {
            let tokens: Vec<u32> = tensor.flatten_all()?.to_dtype(DType::U32)?.to_vec1()?;
            self.before += self.rows;
            self.rows = u32::try_from(tokens.len())?;
            let positions: Vec<u32> = (self.before..self.before + self.rows).collect();
            self.writer.begin_step(&tokens, &positions, GLOBAL_TENSORS + LAYER_TENSORS * self.layers)?;
            return Ok(());
        }
        let tensor = tensor.squeeze(0)?;
        let (element, bytes) = bytes(&tensor)?;
        self.writer.tensor(name.parse()?, element, tensor.dims(), &bytes, None)?;
        if name == "logits" {
            self.writer.end_step()?;
        }
        Ok(())
    }
}

/// The element type of a tensor and its elements, little-endian.
fn bytes(tensor: &Tensor) -> Result<(Element, Vec<u8>)> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::F16 => (Element::F16, flat.to_vec1::<f16>()?.iter().flat_map(|x| x.to_le_bytes()).collect()),
        DType::BF16 => {
            (Element::Bf16, flat.to_vec1::<bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        _ => {
            let wide: Vec<f32> = flat.to_dtype(DType::F32)?.to_vec1()?;
            (Element::F32, wide.iter().flat_map(|x| x.to_le_bytes()).collect())
        }
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokens, options @ ..] = &arguments[..] else {
        return Err("usage: MODEL.gguf TOKEN,… [--decode N] [--dump FOLDER] [--dtype f32|f16|bf16]".into());
    };
    let option = |name: &str| options.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
    let tokens = tokens.split(',').map(str::parse).collect::<std::result::Result<Vec<u32>, _>>()?;
    let decode: usize = option("--decode").map_or(Ok(0), |n| n.parse())?;
    let dtype = match option("--dtype").as_deref() {
        None => ModelDType::Auto,
        Some("f32") => ModelDType::F32,
        Some("f16") => ModelDType::F16,
        Some("bf16") => ModelDType::BF16,
        Some(other) => return Err(format!("--dtype {other}: expected f32, f16 or bf16").into()),
    };
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(run(Path::new(model), tokens, decode, dtype, option("--dump")))
}

async fn run(
    model: &Path,
    tokens: Vec<u32>,
    decode: usize,
    dtype: ModelDType,
    dump: Option<String>,
) -> Result<()> {
    let file = model.file_name().ok_or("the model is a file")?.to_string_lossy().into_owned();
    let folder = model.parent().unwrap_or(Path::new(".")).to_string_lossy().into_owned();
    let folder = if folder.is_empty() { ".".to_owned() } else { folder };
    let config = GGUFSpecificConfig { topology: None };
    let loader = GGUFLoaderBuilder::new(None, None, folder, vec![file.clone()], config, false, None).build();
    let mapping = DeviceMapSetting::Auto(AutoDeviceMapParams::default_text());
    let pipeline = loader.load_model_from_hf(
        None,
        TokenSource::None,
        &dtype,
        &Device::Cpu,
        true,
        mapping,
        None,
        None,
    )?;
    let layers = pipeline.lock().await.get_metadata().num_hidden_layers;
    let method = DefaultSchedulerMethod::Fixed(1.try_into()?);
    let engine = MistralRsBuilder::new(pipeline, SchedulerConfig::DefaultScheduler { method }, false, None)
        .with_no_prefix_cache(true)
        .build()
        .await;
    let shown = dump.map(|folder| {
        let producer = Producer {
            name: "mistral.rs".into(),
            version: Some(MISTRALRS.into()),
            backend: Some("cpu".into()),
            ..Producer::default()
        };
        let model = ModelInfo { file: Some(file), ..ModelInfo::default() };
        let writer = Writer::create(Path::new(&folder), producer, model)?;
        Ok::<_, Box<dyn Error>>(Arc::new(Mutex::new(Some(Dump { writer, before: 0, rows: 0, layers }))))
    });
    let shown = shown.transpose()?;
    if let Some(shown) = shown.clone() {
        observe(Some(Box::new(move |name, tensor| {
            let mut dump = shown.lock().map_err(|_| candle_core::Error::msg("the dump failed before"))?;
            let Some(dump) = dump.as_mut() else { return Ok(()) };
            dump.put(name, tensor).map_err(|error| candle_core::Error::msg(format!("{name}: {error}")))
        })));
    }
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    // What is generated is computed by one pass more than it has tokens, but for the last.
    let sampling = SamplingParams { max_len: Some(decode + 1), ..SamplingParams::deterministic() };
    let request =
        NormalRequest::new_simple(RequestMessage::CompletionTokens(tokens), sampling, sender, 0, None, None);
    engine.get_sender(None)?.send(Request::Normal(Box::new(request))).await?;
    let answer = receiver.recv().await.ok_or("mistral.rs gave no answer")?;
    observe(None);
    match answer {
        Response::CompletionDone(done) => println!("{}", done.choices[0].text),
        Response::CompletionModelError(error, _) => return Err(error.into()),
        Response::InternalError(error) | Response::ValidationError(error) => {
            return Err(error.to_string().into());
        }
        _ => return Err("mistral.rs gave another kind of answer".into()),
    }
    if let Some(shown) = shown
        && let Some(dump) = shown.lock().map_err(|_| "the dump failed")?.take()
    {
        dump.writer.finish()?;
    }
    Ok(())
}
