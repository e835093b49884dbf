//! Asks an OpenAI-compatible server for the likeliest continuation of a prompt, with log-probabilities.

use std::path::Path;

use serde_json::json;

use crate::error::{Error, Result};

/// Names the server's key: no flag does, which other users of a machine could read.
pub const KEY_VARIABLE: &str = "PARITY_API_KEY";

/// What a server is asked.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// Address of the server, with or without `/v1`.
    pub url: &'a str,
    /// The model, where the server has several.
    pub model: Option<&'a str>,
    /// Text of the prompt, where there is one.
    pub text: Option<&'a str>,
    /// Tokens of the prompt, for where there is none.
    pub tokens: &'a [u32],
    /// Tokens to generate.
    pub n_predict: usize,
}

/// How many of the likeliest tokens are asked for: what OpenAI's completions allow at most.
const TOP: usize = 5;
/// Bytes of an answer at most.
#[cfg(feature = "hub")]
const ANSWER_BYTES_MAX: u64 = 16 << 20;

impl Question<'_> {
    /// Where it is posted.
    fn address(&self) -> String {
        let base = self.url.trim_end_matches('/');
        let base = base.strip_suffix("/completions").unwrap_or(base);
        match base.ends_with("/v1") {
            true => format!("{base}/completions"),
            false => format!("{base}/v1/completions"),
        }
    }

    fn body(&self) -> String {
        let prompt = self.text.map_or_else(|| json!(self.tokens), |text| json!(text));
        let mut body = json!({
            "prompt": prompt, "max_tokens": self.n_predict, "temperature": 0, "logprobs": TOP, "n": 1, "stream": false,
        });
        if let Some(model) = self.model {
            body["model"] = json!(model);
        }
        body.to_string()
    }

    /// Asks, and writes the answer to a file as it came.
    ///
    /// # Errors
    /// A server that does not answer, or refuses; a file that cannot be written.
    pub fn ask(&self, to: &Path) -> Result<()> {
        let answer = post(&self.address(), &self.body())?;
        std::fs::write(to, answer).map_err(|e| Error::file(to, format!("cannot be written: {e}")))
    }
}

#[cfg(feature = "hub")]
fn post(address: &str, body: &str) -> Result<String> {
    /// A slow server generates a few tokens in this time.
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(300);
    let failed = |why: String| {
        Error::new(address, format!("the server did not answer: {why}"))
            .expected("an OpenAI-compatible server, as llama-server, vLLM or SGLang")
    };
    let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false);
    let agent: ureq::Agent = config.build().into();
    let mut request = agent.post(address).header("content-type", "application/json");
    if let Ok(key) = std::env::var(KEY_VARIABLE) {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let mut response = request.send(body).map_err(|e| failed(e.to_string()))?;
    let status = response.status().as_u16();
    let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
    let text = read.map_err(|e| failed(e.to_string()))?;
    if (200..300).contains(&status) {
        return Ok(text);
    }
    let shown: String = text.chars().take(200).collect();
    Err(Error::new(address, format!("the server refused: status {status}"))
        .expected("200")
        .found(shown)
        .hint(format!("{KEY_VARIABLE} holds its key, --server-model NAME its model")))
}

#[cfg(not(feature = "hub"))]
fn post(address: &str, _body: &str) -> Result<String> {
    Err(Error::new(address, "this build asks no servers")
        .expected("the cargo feature `hub`")
        .hint("ask it with curl, and hand over the answer: --logprobs FILE"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_have_the_version_or_not() {
        let of = |url| Question { url, model: None, text: None, tokens: &[1], n_predict: 1 }.address();
        for url in ["http://a:8080", "http://a:8080/", "http://a:8080/v1", "http://a:8080/v1/completions"] {
            assert_eq!(of(url), "http://a:8080/v1/completions");
        }
    }
}
