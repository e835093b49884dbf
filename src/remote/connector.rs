//! The HTTP that the stores speak through: ureq, which fetches models too. One TLS library is enough.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use http_body::Body as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(15);
/// How long an answer may take to begin.
const ANSWER: Duration = Duration::from_secs(60);

/// Makes clients.
#[derive(Debug)]
pub struct Ureq;

#[derive(Debug)]
struct Client(ureq::Agent);

impl HttpConnector for Ureq {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // WebDAV has methods of its own.
            .allow_non_standard_methods(true)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(ANSWER));
        Ok(HttpClient::new(Client(config.build().into())))
    }
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, mut body) = request.into_parts();
        let mut bytes = Vec::with_capacity(body.content_length());
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            if let Ok(data) = frame?.into_data() {
                bytes.extend_from_slice(&data);
            }
        }
        let agent = self.0.clone();
        let work = move || {
            let request = ureq::http::Request::from_parts(parts, bytes);
            // A body, even an empty one, is refused for methods that have none.
            let answer =
                match request.body().is_empty() && !matches!(request.method().as_str(), "PUT" | "POST") {
                    true => agent.run(request.map(|_| ())),
                    false => agent.run(request),
                };
            let (parts, body) = answer?.into_parts();
            // What was asked for is a range of known length; an answer that is longer is cut where it is checked.
            let body = body.into_with_config().limit(u64::MAX).read_to_vec()?;
            Ok((parts, body))
        };
        let answer = tokio::task::spawn_blocking(work).await;
        let answer = answer.map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        let (parts, body) = answer.map_err(|e: ureq::Error| HttpError::new(kind(&e), e))?;
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(body)))
    }
}

/// Whether it is worth trying again.
fn kind(error: &ureq::Error) -> HttpErrorKind {
    match error {
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    }
}
