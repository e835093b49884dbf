//! The chat template, by what it makes of messages.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::Carried;
#[cfg(not(unix))]
use crate::elsewhere::limit;
use crate::error::{Error, Result};
use crate::files::{TEXT_BYTES_MAX, read};
use crate::gguf::Gguf;

/// Instructions of a template that are carried out for one conversation.
const FUEL: u64 = 200_000;
/// Bytes of a template that is rendered; larger ones are compared as text.
const TEMPLATE_BYTES_MAX: usize = 256 << 10;
/// Characters that are shown of where two differ.
const SHOWN: usize = 40;

/// Compares the templates of a folder with those of the file.
///
/// # Errors
/// A file of the folder that cannot be read.
pub fn compare(gguf: &Gguf, folder: &Path, config: &Json, out: &mut Carried) -> Result<()> {
    let (place, theirs) = of_folder(folder, config)?;
    let special = |what: &str| {
        let token = &config[format!("{what}_token")];
        token.as_str().or_else(|| token["content"].as_str()).unwrap_or_default().to_owned()
    };
    let special = [special("bos"), special("eos")];
    for (name, original) in &theirs {
        let key = match name.as_str() {
            "default" => "tokenizer.chat_template".to_owned(),
            other => format!("tokenizer.chat_template.{other}"),
        };
        let id = format!("template.{name}");
        let place = format!("{place}, {key}");
        match gguf.str(&key)? {
            None => {
                let says = (format!("{} characters", original.chars().count()), "no template".to_owned());
                let effect = "llama.cpp takes ChatML for chats, whatever the model was trained with";
                let effect = if name == "default" { effect } else { "llama.cpp has no such template" };
                out.note(&id, place, says, effect);
            }
            Some(own) if own == original => {}
            Some(own) => one(&id, place, (original, own), &special, out),
        }
    }
    if theirs.is_empty()
        && let Some(own) = gguf.str("tokenizer.chat_template")?
    {
        let says = ("no template".to_owned(), format!("{} characters", own.chars().count()));
        out.note("template.default", "tokenizer.chat_template".to_owned(), says, "llama.cpp uses the file's");
    }
    Ok(())
}

/// Where the folder has its templates, and what they are, by name.
fn of_folder(folder: &Path, config: &Json) -> Result<(&'static str, Vec<(String, String)>)> {
    let file = folder.join("chat_template.jinja");
    if file.exists() {
        return Ok(("chat_template.jinja", vec![("default".to_owned(), read(&file, TEXT_BYTES_MAX)?)]));
    }
    let older = super::json(folder, "chat_template.json")?;
    let (place, found) = match &older {
        Some(json) => ("chat_template.json", &json["chat_template"]),
        None => ("tokenizer_config.json chat_template", &config["chat_template"]),
    };
    let named = |json: &Json| {
        let text = |key: &str| json[key].as_str().map(str::to_owned);
        Some((text("name")?, text("template")?))
    };
    Ok((
        place,
        match found {
            Json::String(text) => vec![("default".to_owned(), text.clone())],
            Json::Array(list) => list.iter().filter_map(named).collect(),
            _ => Vec::new(),
        },
    ))
}

/// Conversations that templates treat differently.
fn conversations() -> [(&'static str, Json, bool); 5] {
    let of = |role: &str, text: &str| json!({ "role": role, "content": text });
    let (system, user, answer) =
        (of("system", "Be brief."), of("user", " Hi there \n"), of("assistant", "Hello!"));
    [
        ("a question", json!([user]), true),
        ("a question after a system message", json!([system, user]), true),
        ("a second question", json!([user, answer, user]), true),
        ("a second question after a system message", json!([system, user, answer, user]), true),
        ("a question and its answer", json!([user, answer]), false),
    ]
}

fn one(id: &str, place: String, (original, own): (&str, &str), special: &[String; 2], out: &mut Carried) {
    const EFFECT: &str = "llama.cpp uses the file's: chats reach the model in another form";
    let (Some(theirs), Some(ours)) = (apart(original, special), apart(own, special)) else {
        let says = (format!("{} characters", original.len()), format!("{} characters", own.len()));
        return out.note(id, place, says, "the texts differ, and one cannot be rendered here");
    };
    for ((what, ..), (wanted, own)) in conversations().iter().zip(theirs.into_iter().zip(ours)) {
        let (wanted, own) = match (wanted, own) {
            (Ok(wanted), Ok(own)) if wanted != own => (wanted, own),
            // What both refuse is the same, whatever they say of it.
            (Ok(wanted), Err(error)) => (wanted, format!("refused: {error}")),
            (Err(error), Ok(own)) => (format!("refused: {error}"), own),
            _ => continue,
        };
        let at = wanted.chars().zip(own.chars()).take_while(|(a, b)| a == b).count();
        let shown = |text: &str| {
            let rest: String = text.chars().skip(at.saturating_sub(8)).take(SHOWN).collect();
            format!("{rest:?} from character {} of {what}", at.saturating_sub(8))
        };
        return out.note(id, place, (shown(&wanted), shown(&own)), EFFECT);
    }
}

/// What a template makes of each conversation, or why it refuses it.
type Made = Vec<std::result::Result<String, String>>;

/// What a process of its own is given, on its standard input.
#[derive(Serialize, Deserialize)]
struct Order {
    template: String,
    special: [String; 2],
}

/// The hidden command of that process.
pub const COMMAND: &str = "render-template";

/// Renders a template in a process of its own: a few instructions of a foreign one can ask for all memory, which no
/// limit on instructions prevents. Nothing where it cannot be rendered, or takes too much.
fn apart(template: &str, special: &[String; 2]) -> Option<Made> {
    if template.len() > TEMPLATE_BYTES_MAX {
        return None;
    }
    let order = Order { template: template.to_owned(), special: special.clone() };
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let written =
        child.stdin.take().map(|mut stdin| stdin.write_all(&serde_json::to_vec(&order).unwrap_or_default()));
    let mut said = Vec::new();
    let read = child.stdout.take().map(|stdout| stdout.take(TEXT_BYTES_MAX).read_to_end(&mut said));
    let ended = child.wait().ok()?;
    let whole = ended.success() && matches!((written, read), (Some(Ok(())), Some(Ok(_))));
    serde_json::from_slice::<Option<Made>>(&said).ok().flatten().filter(|_| whole)
}

/// The process of its own: what it is given on its standard input, rendered to its standard output.
///
/// # Errors
/// An input that is no order, an output that cannot be written.
pub fn render() -> Result<()> {
    limit();
    let failed = |e: &dyn std::fmt::Display| Error::new(COMMAND, format!("cannot be carried out: {e}"));
    let mut given = Vec::new();
    std::io::stdin().take(TEXT_BYTES_MAX).read_to_end(&mut given).map_err(|e| failed(&e))?;
    let order: Order = serde_json::from_slice(&given).map_err(|e| failed(&e))?;
    let template = Template::new(&order.template, &order.special);
    let made: Option<Made> = template.map(|template| {
        conversations().iter().map(|(_, messages, prompt)| template.render(messages, *prompt)).collect()
    });
    let said = serde_json::to_vec(&made).map_err(|e| failed(&e))?;
    std::io::stdout().write_all(&said).map_err(|e| failed(&e))
}

/// Memory that rendering may take, and seconds.
#[cfg(unix)]
const MEMORY_MAX: u64 = 1 << 30;
#[cfg(unix)]
const SECONDS_MAX: u64 = 10;

/// Ends this process where it takes more.
#[cfg(unix)]
fn limit() {
    for (what, most) in [(libc::RLIMIT_AS, MEMORY_MAX), (libc::RLIMIT_CPU, SECONDS_MAX)] {
        let most = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: the pointer is to a value that outlives the call.
        unsafe { libc::setrlimit(what, &raw const most) };
    }
}

/// A template that can be rendered.
struct Template {
    environment: Environment<'static>,
    special: [String; 2],
}

impl Template {
    /// Parses it as transformers does: blocks take the line break after them and the white space before.
    fn new(text: &str, special: &[String; 2]) -> Option<Template> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        environment.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build().ok()?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(method);
        environment.add_function(
            "raise_exception",
            |text: String| -> std::result::Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
            },
        );
        // A fixed day, so that two templates say the same one.
        environment.add_function("strftime_now", |_: String| "2026-01-01".to_owned());
        environment.add_filter("tojson", |value: Value, _: Kwargs| {
            serde_json::to_string(&value).unwrap_or_default()
        });
        // Marks of what is trained on, which print nothing.
        let text = [
            "{% generation %}",
            "{%- generation %}",
            "{%- generation -%}",
            "{% endgeneration %}",
            "{%- endgeneration %}",
            "{%- endgeneration -%}",
        ]
        .iter()
        .fold(text.to_owned(), |text, mark| text.replace(mark, ""));
        environment.add_template_owned("chat", text).ok()?;
        Some(Template { environment, special: special.clone() })
    }

    fn render(&self, messages: &Json, prompt: bool) -> std::result::Result<String, String> {
        let [bos, eos] = &self.special;
        let said = json!({
            "messages": messages, "add_generation_prompt": prompt, "bos_token": bos, "eos_token": eos, "tools": null,
        });
        let template = self.environment.get_template("chat").map_err(|e| e.to_string())?;
        template.render(Serde(&said)).map_err(|e| e.detail().unwrap_or("no text").to_owned())
    }
}

/// Methods of Python's strings and dictionaries that templates call.
fn method(
    _: &mut minijinja::State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    let unknown = || minijinja::Error::from(ErrorKind::UnknownMethod);
    let first = args.first().and_then(|arg| arg.as_str());
    if let Some(text) = value.as_str() {
        let set = |c: char| first.map_or(c.is_whitespace(), |set| set.contains(c));
        let list = |parts: Vec<&str>| Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>());
        return Ok(match (method, first) {
            ("strip", _) => text.trim_matches(set).into(),
            ("lstrip", _) => text.trim_start_matches(set).into(),
            ("rstrip", _) => text.trim_end_matches(set).into(),
            ("startswith", Some(part)) => text.starts_with(part).into(),
            ("endswith", Some(part)) => text.ends_with(part).into(),
            ("upper", _) => text.to_uppercase().into(),
            ("lower", _) => text.to_lowercase().into(),
            ("title", _) => title(text).into(),
            ("split", Some(part)) if !part.is_empty() => list(text.split(part).collect()),
            ("split", None) => list(text.split_whitespace().collect()),
            ("replace", Some(part)) => match args.get(1).and_then(|arg| arg.as_str()) {
                Some(by) => text.replace(part, by).into(),
                None => return Err(unknown()),
            },
            ("find", Some(part)) => text.find(part).map_or(-1, |at| at as i64).into(),
            _ => return Err(unknown()),
        });
    }
    match method {
        "items" => value.try_iter().map(|keys| {
            let pair = |key: Value| Value::from(vec![key.clone(), value.get_item(&key).unwrap_or_default()]);
            Value::from(keys.map(pair).collect::<Vec<_>>())
        }),
        "keys" => value.try_iter().map(|keys| Value::from(keys.collect::<Vec<_>>())),
        "get" => {
            let key = args.first().ok_or_else(unknown)?;
            let found = value.get_item(key).unwrap_or_default();
            let otherwise = args.get(1).cloned().unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() { otherwise } else { found })
        }
        _ => Err(unknown()),
    }
}

fn title(text: &str) -> String {
    let mut before = ' ';
    let upper = |c: char| {
        let first = !before.is_alphabetic();
        before = c;
        if first { c.to_uppercase().collect::<String>() } else { c.to_lowercase().collect() }
    };
    text.chars().map(upper).collect()
}
