"""Dashboards as code: `python -m deploy.grafana` writes the JSON that Grafana reads."""
