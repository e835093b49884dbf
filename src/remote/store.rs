//! A folder that lies elsewhere: files by name, whole or by ranges.
//!
//! Credentials come from the environment alone, and no message has them.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use crate::error::{Error, Result};

/// Where S3's credentials may be; without any of them nothing is signed, as for a public bucket.
const CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
];
/// What no message may have in it.
const SECRETS: [&str; 4] =
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_CONTAINER_AUTHORIZATION_TOKEN"];
/// How often a request that failed on the way is made again, and for how long.
const RETRIES: RetryConfig = RetryConfig {
    backoff: BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(5),
        base: 2.0,
    },
    max_retries: 4,
    retry_timeout: Duration::from_secs(60),
};
/// Characters of a server's message that are shown.
const MESSAGE_MAX: usize = 300;

/// A folder.
pub struct Store {
    url: String,
    store: Arc<dyn ObjectStore>,
    /// Keys begin with it.
    prefix: String,
    runtime: Runtime,
}

impl Store {
    /// Opens the folder at an address, or of this machine. Nothing is asked of a server yet.
    ///
    /// # Errors
    /// An address of another form, or with a password in it.
    pub fn open(path: &Path) -> Result<Store> {
        let url = path.to_str().unwrap_or_default().trim_end_matches('/').to_owned();
        let wrong = |e: object_store::Error| {
            Error::new(&url, format!("cannot be opened: {}", scrubbed(&e.to_string())))
        };
        let (scheme, rest) = url.split_once("://").unwrap_or(("", &url));
        let (host, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if scheme.starts_with("http") && (host.contains('@') || prefix.contains('?')) {
            // Whoever sees the command line, a report or a log would see it.
            return Err(Error::new(
                format!("{scheme}://{}…", host.rsplit('@').next().unwrap_or_default()),
                "an address is no place for credentials",
            )
            .expected("https://HOST/PATH without a name, a password or a signature"));
        }
        let (store, prefix): (Arc<dyn ObjectStore>, &str) = match scheme {
            "s3" => {
                let mut builder = AmazonS3Builder::from_env().with_bucket_name(host).with_retry(RETRIES);
                if !CREDENTIALS.iter().any(|name| std::env::var_os(name).is_some_and(|v| !v.is_empty())) {
                    builder = builder.with_skip_signature(true);
                }
                (
                    Arc::new(builder.with_http_connector(super::connector::Ureq).build().map_err(wrong)?),
                    prefix,
                )
            }
            "http" | "https" => {
                let builder = HttpBuilder::new().with_url(format!("{scheme}://{host}")).with_retry(RETRIES);
                (
                    Arc::new(builder.with_http_connector(super::connector::Ureq).build().map_err(wrong)?),
                    prefix,
                )
            }
            _ => {
                let folder = std::path::absolute(path).map_err(|e| Error::file(path, e))?;
                std::fs::create_dir_all(&folder)
                    .map_err(|e| Error::file(path, format!("cannot be written: {e}")))?;
                (Arc::new(LocalFileSystem::new_with_prefix(folder).map_err(wrong)?), "")
            }
        };
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_time().build();
        let runtime = runtime.map_err(|e| Error::new(&url, format!("cannot be asked: {e}")))?;
        let prefix = prefix.trim_matches('/').to_owned();
        Ok(Store { store, prefix, runtime, url })
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    fn key(&self, name: &str) -> Result<Key> {
        let full = if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) };
        // As it stands in an address: what is spelt %20 there is a space.
        Key::from_url_path(&full)
            .map_err(|e| Error::new(format!("{}/{name}", self.url), format!("is no address: {e}")))
    }

    /// What a store said of a file.
    fn failed(&self, name: &str, error: &object_store::Error) -> Error {
        let subject = format!("{}/{name}", self.url);
        match error {
            object_store::Error::NotFound { .. } => Error::new(subject, "there is no such file"),
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Error::new(subject, "the server refuses access")
                    .hint("credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN")
            }
            other => {
                let mut text = other.to_string();
                let mut source = std::error::Error::source(other);
                while let Some(cause) = source {
                    let more = cause.to_string();
                    if !text.contains(&more) {
                        text += &format!(": {more}");
                    }
                    source = cause.source();
                }
                let text: String = scrubbed(&text).chars().take(MESSAGE_MAX).collect();
                let error = Error::new(subject, format!("the server did not answer as it should: {text}"));
                match self.url.starts_with("s3://") {
                    true => error.hint("AWS_REGION and AWS_ENDPOINT_URL say where the bucket is; AWS_ALLOW_HTTP=true allows http"),
                    false => error.hint("the server has to know ranges (Range: bytes=…), as S3 and nginx do"),
                }
            }
        }
    }

    /// A file's size and what tells one version of it from another.
    ///
    /// # Errors
    /// The server's.
    pub fn head(&self, name: &str) -> Result<ObjectMeta> {
        let key = self.key(name)?;
        self.runtime.block_on(self.store.head(&key)).map_err(|e| self.failed(name, &e))
    }

    /// A whole file of at most `limit` bytes; `None` where there is none.
    ///
    /// # Errors
    /// The server's, and a longer file.
    pub fn get(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let key = self.key(name)?;
        let got = self.runtime.block_on(async {
            let found = self.store.get(&key).await?;
            match found.meta.size <= limit {
                true => Ok(Ok(found.bytes().await?.to_vec())),
                false => Ok(Err(found.meta.size)),
            }
        });
        match got {
            Ok(Ok(bytes)) => Ok(Some(bytes)),
            Ok(Err(size)) => {
                Err(Error::new(format!("{}/{name}", self.url), "is too large to be read at once")
                    .expected(format!("at most {limit} bytes"))
                    .found(size))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.failed(name, &e)),
        }
    }

    /// Ranges of a file, in their order; those that are near to one another are one request, several are under way at a time.
    ///
    /// # Errors
    /// The server's, and an answer of another length.
    pub fn ranges(&self, name: &str, ranges: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
        let key = self.key(name)?;
        let got = self.runtime.block_on(self.store.get_ranges(&key, ranges));
        let got = got.map_err(|e| self.failed(name, &e))?;
        let as_asked =
            |(bytes, range): (&bytes::Bytes, &Range<u64>)| bytes.len() as u64 == range.end - range.start;
        if !got.iter().zip(ranges).all(as_asked) {
            return Err(Error::new(format!("{}/{name}", self.url), "is shorter than its header says"));
        }
        Ok(got.into_iter().map(|bytes| bytes.to_vec()).collect())
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The server's.
    pub fn put(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let key = self.key(name)?;
        let put = self.runtime.block_on(self.store.put(&key, PutPayload::from(bytes)));
        put.map(|_| ()).map_err(|e| self.failed(name, &e))
    }

    /// Writes a large file in parts.
    ///
    /// # Errors
    /// The server's.
    pub fn put_parts(
        &self,
        name: &str,
        parts: &mut dyn Iterator<Item = std::io::Result<Vec<u8>>>,
    ) -> Result<()> {
        let key = self.key(name)?;
        let unreadable = |e: std::io::Error| Error::new(name, format!("cannot be read: {e}"));
        let failed = |e: object_store::Error| self.failed(name, &e);
        let mut upload = self.runtime.block_on(self.store.put_multipart(&key)).map_err(failed)?;
        let mut write = || -> Result<()> {
            for part in &mut *parts {
                let payload = PutPayload::from(part.map_err(unreadable)?);
                self.runtime.block_on(upload.put_part(payload)).map_err(failed)?;
            }
            Ok(())
        };
        match write() {
            Ok(()) => self.runtime.block_on(upload.complete()).map(|_| ()).map_err(failed),
            Err(error) => {
                // What was sent so far would be paid for.
                let _ = self.runtime.block_on(upload.abort());
                Err(error)
            }
        }
    }
}

/// A message without what is secret: servers repeat the key that they do not know.
fn scrubbed(text: &str) -> String {
    let secrets =
        SECRETS.iter().filter_map(|name| std::env::var(name).ok()).filter(|value| !value.is_empty());
    secrets.fold(text.to_owned(), |text, secret| text.replace(&secret, "…"))
}
