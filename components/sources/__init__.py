"""What results depend on besides settings: code, files and versions of packages, as digests for fingerprints."""
