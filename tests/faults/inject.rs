//! Faults are injected where they are told to sit, and refused where they cannot.

use parity::faults::inject::{Spec, inject};
use parity::faults::{Argument, catalogue};

use crate::support::runs::model as tiny;

fn specs(texts: &[&str]) -> Vec<Spec> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn every_fault_can_be_injected_in_one_of_the_tiny_models() {
    let models = ["qwen2-tiny-py-F16.gguf", "qwen2-tiny-py-Q4_K_M.gguf"].map(tiny);
    for fault in catalogue::all() {
        let injected = models.iter().flatten().any(|model| {
            let mut graph = model.graph.clone();
            let injected = inject(&mut graph, &specs(&[fault.name]), model);
            injected.is_ok_and(|injected| {
                assert!(!injected[0].nodes.is_empty(), "{}", fault.name);
                assert!(!injected[0].sentence.is_empty(), "{}", fault.name);
                graph != model.graph
            })
        });
        // The tiny models have no frequency factors.
        assert!(injected || fault.name == "rope.no_freqs", "{} changes nothing", fault.name);
    }
}

#[test]
fn a_fault_sits_where_it_is_told_to() {
    let Some(model) = tiny("qwen2-tiny-py-F16.gguf") else { return eprintln!("SKIP: no tiny models") };
    let nodes = |spec: &str| -> Vec<String> {
        let injected = inject(&mut model.graph.clone(), &specs(&[spec]), &model).unwrap();
        injected[0].nodes.iter().map(ToString::to_string).collect()
    };
    assert_eq!(nodes("rope.base@3"), ["blk.3.q_rope", "blk.3.k_rope"]);
    assert_eq!(nodes("rope.base@blk.1.k_rope"), ["blk.1.k_rope"]);
    assert_eq!(nodes("linear.no_bias@0..1").len(), 6);
    assert_eq!(nodes("attn.kv_head@2"), ["blk.2.attn_ctx"]);
    assert_eq!(nodes("norm.eps=1e-3@final_norm"), ["final_norm"]);
    assert_eq!(nodes("residual.missing").len(), 4);
    assert_eq!(nodes("logits.stride"), ["logits"]);

    let mut graph = model.graph.clone();
    let injected = inject(&mut graph, &specs(&["rope.base=5000@2", "data.nan@blk.3.v"]), &model).unwrap();
    assert_eq!(injected[0].argument, Argument::Number(5000.0));
    assert_eq!(injected[0].sentence, "RoPE base is 5000, the model says 1000000");
    assert_eq!(injected[1].nodes[0].to_string(), "blk.3.v");
}

#[test]
fn what_cannot_be_injected_is_refused_with_a_reason() {
    let Some(model) = tiny("qwen2-tiny-py-F16.gguf") else { return eprintln!("SKIP: no tiny models") };
    let refusal = |spec: &str| match spec.parse::<Spec>() {
        Ok(spec) => inject(&mut model.graph.clone(), &[spec], &model).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    assert!(refusal("rope.bsae@1").contains("rope.base"), "{}", refusal("rope.bsae@1"));
    assert!(refusal("rope.base@4").contains("layers 0 to 3"));
    assert!(refusal("rope.base@three").contains("a layer (3)"));
    assert!(refusal("rope.base=wide").contains("base: a number"));
    assert!(refusal("rope.none=3").contains("no argument"));
    assert!(refusal("embed.transposed@1").contains("outside the layers"));
    assert!(refusal("rope.base@blk.0.ffn_norm").contains("blk.0.ffn_norm has no place"));
    assert!(refusal("rope.base@blk.9.q_rope").contains("no such node"));
    assert!(refusal("rope.partial=7").contains("the argument 7"));
    assert!(
        refusal("rope.base=1000000@1").contains("blk.1.q_rope is so already"),
        "{}",
        refusal("rope.base=1000000@1")
    );
}
