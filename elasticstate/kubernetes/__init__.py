"""Jobs in pods of Kubernetes: agents dial in from their pods, and the driver watches these pods.

``elasticrun --listen 0.0.0.0:7000 --token-file F --pod-selector app=elastic-agents -np 2 train.py`` in a pod whose
service account may list and watch pods. docs/guides/kubernetes.md describes it, and deploy/kubernetes/ has the
manifests.
"""
