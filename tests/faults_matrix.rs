//! Every fault of the catalogue, planted in the engine: found at the right node and called by its name.

mod support;

use parity::faults::catalogue;
use parity::faults::inject::plant;
use support::{Random, audit_all, diagnose_at, model, run};

#[test]
fn explore() {
    let name = std::env::var("EXPLORE").unwrap_or("qwen2-tiny-py-F16.gguf".into());
    let Some(model) = model(&name) else { return eprintln!("SKIP") };
    let only = std::env::var("ONLY").unwrap_or_default();
    let mut random = Random(7);
    for fault in catalogue::all().filter(|f| f.name.contains(&only)) {
        let layers: &[u32] = if fault.home.kinds().iter().any(|k| k.in_layer()) { &[0, 3] } else { &[99] };
        for &layer in layers {
            let spec = if layer == 99 { fault.name.to_owned() } else { format!("{}@{layer}", fault.name) };
            let tokens = random.tokens(9, 4000);
            let mut graph = model.graph.clone();
            let planted = match plant(&mut graph, &[spec.parse().unwrap()], &model) {
                Ok(p) => p,
                Err(e) => {
                    println!("{spec:28} -- {}", e.to_string().lines().next().unwrap());
                    continue;
                }
            };
            let kept = run(&model, &graph, &tokens, 6, false);
            let audit = audit_all(&model, &kept);
            let origins: Vec<_> = audit.origins().collect();
            let same = origins == planted[0].nodes;
            println!(
                "{spec:28} {} planted {:?} origins {:?}",
                if same { "ok " } else { "BAD" },
                planted[0].nodes.iter().map(|c| c.to_string()).collect::<Vec<_>>(),
                origins.iter().map(|c| c.to_string()).collect::<Vec<_>>()
            );
            for origin in origins.iter().take(2) {
                let start = std::time::Instant::now();
                let d = diagnose_at(&model, &kept, *origin);
                let right = d.diagnosis.first().is_some_and(|d| d.fault == fault.name);
                println!(
                    "      {} {:.2}s {:?}",
                    if right { "named" } else { "WRONG" },
                    start.elapsed().as_secs_f64(),
                    d.diagnosis
                        .iter()
                        .map(|d| (d.fault.as_str(), d.explains, d.text.as_str()))
                        .collect::<Vec<_>>()
                );
                if let Some(r) = d.residual {
                    println!(
                        "        residual {r}; tried {:?}",
                        d.tried.iter().take(4).map(|t| (&t.fault, t.explains)).collect::<Vec<_>>()
                    );
                }
            }
        }
    }
}
